r"""Numbers as people and models write them, by value: `$29.00`, `9{,}500`, `−5`, `\frac{3}{4}`, `1.2e3`, twelve."""

import re
import unicodedata
from fractions import Fraction

_GROUPED = r"\d{1,3}(?:,\d{2,3})*,\d{3}(?![\d,])|\d{1,3}(?:[ '_]\d{3})+(?!\d)"
_POINTED = r"\d{1,3}(?:\.\d{3})+,\d{1,2}(?!\d)|\d{1,3}(?:\.\d{3}){2,}(?![\d.])"
"""Thousands set apart by points, as in 1.234,50 and 1.234.567."""
_NUMBER = re.compile(
    r"(?P<minus>(?<![\w.)%])-|\bnegative )?(?:[$€£¥] ?(?P<inner>-)?)?(?<![\d.^])(?:(?P<whole>\d+) (?=\d+/\d))?"
    rf"(?P<top>{_POINTED}|(?:{_GROUPED}|\d+,\d{{1,2}}(?![\d,.])|\d+)(?:\.\d+)?|\.\d+)"
    r"(?: ?/ ?(?P<bottom>\d+)(?![\d/.,]))?"
    r"(?:(?:e(?=[-+]?\d)| ?[×x*] ?10\^)(?P<power>[-+]?\d{1,3})(?!\d)|\^(?P<raised>\d{1,2})(?!\d))?"
    r"(?:(?P<short>k)\b| (?P<scale>hundred|thousand|million|billion|trillion|dozen)\b)?",
    re.IGNORECASE,
)
_CODE = re.compile(r"0\d")
"""Leading zeros are part of a code, and no number has them."""
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_PARTS = {"half": 2, "halves": 2, "third": 3, "thirds": 3, "quarter": 4, "quarters": 4, "fourth": 4, "fourths": 4}
_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_VALUES = {word: value for value, word in enumerate(_UNITS)} | {word: 10 * ten for ten, word in enumerate(_TENS, 2)}
_FIRST = rf"{'|'.join(_VALUES)}|an? (?=(?:{'|'.join(_SCALES)}|half|third|quarter)\b)"
_WORDS = re.compile(
    rf"\b(?P<minus>(?:minus|negative) )?(?P<words>(?:{_FIRST})(?:[- ]?(?:and )?(?:{'|'.join((*_VALUES, *_SCALES))}))*)"
    rf"(?:[- ]?(?P<part>{'|'.join(_PARTS)})|(?P<half> and a half))?\b",
    re.IGNORECASE,
)
_NUMERAL = rf"(?=(?:- ?)?\.?\d|minus |negative |(?:{_FIRST}))"
_MARKS = (
    re.compile(rf"####[^\w\n.-]*(?={_NUMERAL}([^\n]*))", re.IGNORECASE),
    re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"),
    re.compile(rf"\banswer(?: is)?[^\w\n.-]*(?={_NUMERAL}([^\n]*))", re.IGNORECASE),
)
_ASIDE = re.compile(r"\(|;|, |\.(?=\s|$)| (?:because|since|where|as)\b")
"""What follows says no more what the number is, but why."""
_CLEANED = (
    (r"[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda match: "^" + unicodedata.normalize("NFKC", match[0])),
    (r"(?<=\d)(?=[¼½¾⅐-⅞])", lambda _: " "),
    (r"(?s).+", lambda match: unicodedata.normalize("NFKC", match[0]).translate(_MINUS)),
    (r"\\[dt]?frac(\d)(\d)", lambda match: f" {match[1]}/{match[2]}"),
    (r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", lambda match: f" {match[1].strip()}/{match[2].strip()}"),
    (r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}", lambda match: f" {match[1]} "),
    (r"\\(?:times|cdot)", lambda _: "×"),
    (r"\^\{([-+]?\d+)\}", lambda match: f"^{match[1]}"),
    (r"\{,\}", lambda _: ","),
    (r"(?<=\d)\*\*(?=\d)", lambda _: "^"),
    (r"(\d+) dollars?,? and (\d\d) cents?", lambda match: f"{match[1]}.{match[2]}"),
    (r"\\[!,]|\*\*|__|`", lambda _: ""),
    (r"\\(?=[$%#])|\\(?:left|right|quad)\b|\\[;:() \[\]]|~", lambda _: " "),
    (r" +", lambda _: " "),
)
_MINUS = str.maketrans(dict.fromkeys("−–‒‑", "-") | dict.fromkeys("⁄∕", "/") | {"’": "'"})


def final_number(text: str) -> Fraction | None:
    r"""The value of the number that a solution ends in; None without one.

    That is the number after the last `####`; without one, that in the last `\boxed{…}`; else the one after the last
    "answer is" or "answer:"; else the last number of all. Of an equation it is the right side; what stands behind a
    comma, a bracket or "because" is none of it.
    """
    text = _cleaned(text)
    for mark in _MARKS:
        if stated := mark.findall(text):
            said = re.sub(r"^\W*?(?:-|minus) ?(?=\.?\d)", "-", stated[-1].strip())
            if spoken := _WORDS.match(said):
                return _spoken(spoken)
            said = said if _ASIDE.match(said) else _ASIDE.split(said)[0]
            return next(iter(_values(said.rpartition("=")[2])), None)
    return next(reversed(_values(text)), None)


def numbers(text: str) -> list[Fraction]:
    """The values of all numbers in a text, in order: of those in digits or, without any, those in words."""
    return _values(_cleaned(text))


def number_of(text: str) -> Fraction | None:
    """The value of a text that is nothing but a number in digits; None if it is not, or is a code such as 007."""
    match = _NUMBER.fullmatch(text.strip())
    return _value(match) if match and not _CODE.match(match["top"]) else None


def _cleaned(text: str) -> str:
    for pattern, replaced in _CLEANED:
        text = re.sub(pattern, replaced, text)
    return text


def _values(text: str) -> list[Fraction]:
    in_digits = [_value(match) for match in _NUMBER.finditer(text) if not _CODE.match(match["top"])]
    return in_digits or [_spoken(match) for match in _WORDS.finditer(text)]


def _value(match: re.Match[str]) -> Fraction:
    top = match["top"]
    if re.fullmatch(_POINTED, top):
        top = top.replace(".", "")
    written = re.sub(r"[ '_,]", "", top) if re.search(rf"^(?:{_GROUPED})", top) else top.replace(",", ".")
    value = Fraction(written) / Fraction(match["bottom"] or 1) if match["bottom"] != "0" else Fraction(written)
    value = (value + int(match["whole"] or 0)) * Fraction(10) ** int(match["power"] or 0)
    value = value ** int(match["raised"] or 1) * _SCALES.get((match["scale"] or "").lower(), 1)
    value *= 1000 if match["short"] else 1
    return -value if match["minus"] or match["inner"] else value


def _spoken(match: re.Match[str]) -> Fraction:
    total = current = 0
    for word in re.findall(r"\w+", match["words"].lower()):
        current = 1 if word in ("a", "an") else current
        scale = _SCALES.get(word, 0)
        if scale > 100:
            total, current = total + max(1, current) * scale, 0
        else:
            current = max(1, current) * scale if scale else current + _VALUES.get(word, 0)
    value = Fraction(total + current, _PARTS.get((match["part"] or "").lower(), 1)) + Fraction(bool(match["half"]), 2)
    return -value if match["minus"] else value
