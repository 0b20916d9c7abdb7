"""Pages, docstrings, comments and messages are in plain English: none of them has the words below."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

INSTEAD = {
    r"seed 00\d": "the source's title",
    r"nought|naught": "zero",
    r"spoil(s|t|ed|ing)?": "corrupt",
    r"whoever": "anyone who",
    r"surely": "significantly",
    r"(un)?heed(s|ed|ing)?": "respect",
    r"(over|un)hear(s|d|ing)?": "record",
    r"borne": "tolerated",
    r"affairs?": "job",
    r"shelf|shelves": "catalogue",
    r"strangers?": "untrusted input, or: readable without knowing the conversation",
    r"by lot|lots": "random draws, at random",
    r"(tell(s|ing)?|told) (\w+ )?apart": "distinguish",
    r"told": "reported, or: computed",
    r"(tells|says) of": "describes, reports",
    r"was not found to": "was not detected",
    r"(is|are) no shares?": "must lie in [0, trials]",
    r"(that|which) (is|are) none": "NaN and infinity, or the exact set",
    r"position laws?": "position mode",
    r"owner of a slot": "segment of a slot",
    r"what stays": "retained slots",
}
"""What style rules out, as patterns of whole words, and what to write."""

WORDS = re.compile(
    "|".join(rf"(?P<w{number}>\b(?:{word})\b)" for number, word in enumerate(INSTEAD)).replace(" ", r"[\s#]+"),
    re.IGNORECASE,
)
"""A space in a pattern is any space, also a new line, within a comment too."""

PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("figures", "probes", "models/features", "models/ordinal")),
]
DATA = sorted((ROOT / "analyses").rglob("*.yaml")) + sorted((ROOT / "kvprobe" / "studies").rglob("*.yaml"))
TEMPLATES = sorted((ROOT / "kvprobe").rglob("*.j2"))
MODULES = sorted((ROOT / "kvprobe").rglob("*.py"))

FIELD = re.compile(r"\{[^{}]*\}")
"""A replacement field of an f-string."""
KEY = re.compile(r"\w*([\"'])\w+\1")
"""A string that is one word: a key or a choice, which may be a name that files have."""


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """What a person reads of a file, with its line numbers: all of a page; of a module its comments and strings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield 1, text
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or token.type == getattr(tokenize, "FSTRING_MIDDLE", None):
            yield token.start[0], token.string
        elif token.type == tokenize.STRING and not KEY.fullmatch(token.string):
            formatted = "f" in token.string[: token.string.index(token.string[-1])].lower()
            yield token.start[0], FIELD.sub(said_within, token.string) if formatted else token.string


def said_within(field: re.Match[str]) -> str:
    """A field of an f-string without its identifiers. From Python 3.12 on, the tokenizer separates them."""
    return " ".join(said for said in re.findall(r"'([^']*)'", field[0]) if " " in said)


def hits(path: Path) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line + text[: match.start()].count(chr(10))}: {match[0]!r}; write "
        f"{list(INSTEAD.values())[int(str(match.lastgroup)[1:])]}"
        for line, text in prose(path)
        for match in WORDS.finditer(text)
    ]


@pytest.mark.parametrize("paths", [PAGES, DATA, TEMPLATES, MODULES], ids=["pages", "data", "templates", "modules"])
def test_no_archaic_or_private_word_is_left(paths: list[Path]):
    left = [hit for path in paths for hit in hits(path)]
    assert not left, "\n" + "\n".join(left)


def test_lines_of_prose_are_at_most_120_characters_long():
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 120 and not line.startswith("|")
    ]
    assert not long, "\n".join(long)


def test_modules_have_at_most_400_lines():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
    assert not {path: length for path, length in lengths.items() if length > 400}
