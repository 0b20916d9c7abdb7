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
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("figures", "probes", "models/features", "models/ordinal")),
]
DATA = sorted((ROOT / "analyses").rglob("*.yaml"))
TEMPLATES = sorted((ROOT / "kvprobe").rglob("*.j2"))
MODULES = sorted((ROOT / "kvprobe").rglob("*.py"))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))

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
        f"{shown(path)}:{line + text[: match.start()].count(chr(10))}: {match[0]!r}; write "
        f"{list(INSTEAD.values())[int(str(match.lastgroup)[1:])]}"
        for line, text in prose(path)
        for match in WORDS.finditer(text)
    ]


def long_lines(page: Path) -> list[str]:
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    return [f"{shown(page)}:{number}" for number, line in lines if len(line) > 120 and not line.startswith("|")]


def is_long(module: Path) -> bool:
    return len(module.read_text(encoding="utf-8").splitlines()) > 400


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


@pytest.mark.parametrize(
    "paths", [PAGES, DATA, TEMPLATES, MODULES, NOTEBOOKS], ids=["pages", "data", "templates", "modules", "notebooks"]
)
def test_no_archaic_or_private_word_is_left(paths: list[Path]):
    assert paths
    left = [hit for path in paths for hit in hits(path)]
    assert not left, "\n" + "\n".join(left)


def test_lines_of_prose_are_at_most_120_characters_long():
    long = [line for page in PAGES for line in long_lines(page)]
    assert not long, "\n".join(long)


def test_modules_have_at_most_400_lines():
    assert not [shown(path) for path in MODULES if is_long(path)]


# ---- the rules catch what they are for

PLANTED = (
    *("Seed 001", "naught", "spoilt", "whoever", "surely", "unheeded", "overhears", "borne", "affairs", "shelves"),
    *(
        "stranger",
        "by lot",
        "tells them apart",
        "told",
        "says of",
        "was not\nfound to",
        "is no share",
        "which are none",
    ),
    *("position law", "owner of a slot", "what stays"),
)


def planted(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize(("pattern", "word"), zip(INSTEAD, PLANTED, strict=True))
def test_a_planted_word_is_caught_with_its_line_and_what_to_write(pattern: str, word: str, tmp_path: Path):
    (hit,) = hits(planted(tmp_path, "page.md", f"# A page\n\nHere it is {word}, and shelfless."))
    assert hit == f"page.md:3: {word!r}; write {INSTEAD[pattern]}"


@pytest.mark.parametrize(
    ("module", "lines"),
    [
        ('"""Numbers\nthat stay whoever reads."""\n', [2]),
        ("x = 1  # surely\n", [1]),
        ('x = "no heed"\ny = f"{x!r} is borne"\n', [1, 2]),
        ("y = f\"{'by lot' if x else 'at random'}\"\n", [1]),
        ("told = {'told': 1, 'kept': told['told']}\ny = f'{told} {told[\"told\"]}'\n", []),
    ],
)
def test_of_a_module_its_comments_and_strings_are_read_but_no_names_and_keys(
    module: str, lines: list[int], tmp_path: Path
):
    caught = hits(planted(tmp_path, "module.py", module))
    assert [int(hit.split(":")[1]) for hit in caught] == lines


def test_a_planted_long_line_and_long_module_are_caught(tmp_path: Path):
    page = planted(tmp_path, "page.md", "\n".join(["a" * 120, "b" * 121, "|" + "c" * 200]))
    assert long_lines(page) == ["page.md:2"]
    lengths = {count: is_long(planted(tmp_path, f"module{count}.py", "x = 1\n" * count)) for count in (400, 401)}
    assert lengths == {400: False, 401: True}
