r"""Numbers as people and models write them, by value: `$29.00`, `9{,}500`, `−5`, `\frac{3}{4}`, `1.2e3`, twelve."""

import re
import unicodedata
from fractions import Fraction

_GROUPED = r"\d{1,3}(?:,\d{2,3})*,\d{3}(?![\d,])|\d{1,3}(?:[ '_]\d{3})+(?!\d)"
_NUMBER = re.compile(
    r"(?P<minus>(?<![\w.)%])-|\bnegative )?(?:[$€£¥] ?(?P<inner>-)?)?(?<![\d.^])(?:(?P<whole>\d+) (?=\d+/\d))?"
    rf"(?P<top>(?:{_GROUPED}|\d+,\d{{1,2}}(?![\d,.])|\d+)(?:\.\d+)?|\.\d+)(?:/(?P<bottom>\d+)(?![\d/.,]))?"
    r"(?:(?:e(?=[-+]?\d)| ?[×x*] ?10\^)(?P<power>[-+]?\d{1,3})(?!\d))?(?: (?P<scale>hundred|thousand|million)\b)?",
    re.IGNORECASE,
)
_CODE = re.compile(r"0\d")
"""Leading zeros are part of a code, and no number has them."""
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6}
_UNITS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"),
)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_VALUES = {word: value for value, word in enumerate(_UNITS)} | {word: 10 * ten for ten, word in enumerate(_TENS, 2)}
_FIRST = "|".join(_VALUES)
_WORDS = re.compile(
    rf"\b(?P<minus>(?:minus|negative) )?(?P<words>(?:{_FIRST})(?:[- ](?:and )?(?:{_FIRST}|{'|'.join(_SCALES)}))*)\b",
    re.IGNORECASE,
)
_MARKS = (
    re.compile(rf"####[^\w\n.-]*(?=[-.]?\d|negative |(?:{_FIRST})\b)([^\n]*)", re.IGNORECASE),
    re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"),
    re.compile(rf"\banswer(?: is)?[^\w\n.-]*(?=[-.]?\d|negative |(?:{_FIRST})\b)([^\n]*)", re.IGNORECASE),
)
_CLEANED = (
    (r"[⁰¹²³⁴⁵⁶⁷⁸⁹]+", lambda match: "^" + unicodedata.normalize("NFKC", match[0])),
    (r"(?<=\d)(?=[¼½¾⅐-⅞])", lambda _: " "),
    (r"(?s).+", lambda match: unicodedata.normalize("NFKC", match[0]).translate(_MINUS)),
    (r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", lambda match: f" {match[1].strip()}/{match[2].strip()}"),
    (r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}", lambda match: f" {match[1]} "),
    (r"\\(?:times|cdot)", lambda _: "×"),
    (r"\^\{([-+]?\d+)\}", lambda match: f"^{match[1]}"),
    (r"\{,\}", lambda _: ","),
    (r"\\[!,]|\*\*|__|`", lambda _: ""),
    (r"\\(?=[$%#])|\\(?:left|right|quad)\b|\\[;:() \[\]]|~", lambda _: " "),
    (r" +", lambda _: " "),
)
_MINUS = str.maketrans(dict.fromkeys("−–‒‑", "-") | dict.fromkeys("⁄∕", "/") | {"’": "'"})


def final_number(text: str) -> Fraction | None:
    r"""The value of the number that a solution ends in; None without one.

    That is the number after the last `####`; without one, that in the last `\boxed{…}`; else the one after the last
    "answer is" or "answer:"; else the last number of all. Of an equation it is the right side.
    """
    text = _cleaned(text)
    for mark in _MARKS:
        if stated := mark.findall(text):
            return next(iter(_values(stated[-1].rpartition("=")[2])), None)
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
    written = re.sub(r"[ '_,]", "", top) if re.search(rf"^(?:{_GROUPED})", top) else top.replace(",", ".")
    value = Fraction(written) / Fraction(match["bottom"] or 1) if match["bottom"] != "0" else Fraction(written)
    value = (value + int(match["whole"] or 0)) * Fraction(10) ** int(match["power"] or 0)
    value *= _SCALES.get((match["scale"] or "").lower(), 1)
    return -value if match["minus"] or match["inner"] else value


def _spoken(match: re.Match[str]) -> Fraction:
    total = current = 0
    for word in re.findall(r"\w+", match["words"].lower()):
        scale = _SCALES.get(word, 0)
        if scale > 100:
            total, current = total + max(1, current) * scale, 0
        else:
            current = max(1, current) * scale if scale else current + _VALUES.get(word, 0)
    return Fraction(-(total + current) if match["minus"] else total + current)
