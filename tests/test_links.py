"""Links between pages lead to files and headings that are there. Links to other sites are not followed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("figures", "probes", "models/features", "models/ordinal")),
]
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(page: Path) -> list[str]:
    """Where the links and images of a page lead, those to other sites left out."""
    targets = LINK.findall(CODE.sub("", page.read_text(encoding="utf-8")))
    return [link for link in targets if not link.startswith(("https://", "http://"))]


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, made as Markdown's `toc` and code hosts make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere."""
    dead_links: list[str] = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead_links.append(f"{page}: {link}")
    return dead_links


def test_every_link_leads_to_a_page_and_a_heading():
    assert sum(len(links(page)) for page in PAGES) > 100
    left = [link for page in PAGES for link in broken(page)]
    assert not left, "\n" + "\n".join(left)


def test_every_page_is_reached_from_the_readme():
    seen, ahead = set[Path](), [ROOT / "README.md"]
    while ahead:
        page = ahead.pop()
        seen.add(page)
        linked = {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}
        ahead += [target for target in linked if target.suffix == ".md" and target not in seen]
    assert set((ROOT / "docs").rglob("*.md")) <= seen


def test_every_page_is_in_the_navigation_of_the_site():
    listed = re.findall(r": ?([\w/-]+\.md)$|- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= {page for pair in listed for page in pair}


@pytest.mark.parametrize(("link", "leads"), [("there.md#a-b", True), ("there.md#b", False), ("gone.md", False)])
def test_a_planted_link_is_followed(link: str, leads: bool, tmp_path: Path):
    (tmp_path / "there.md").write_text("# There\n\n## A b?\n")
    page = tmp_path / "page.md"
    page.write_text(f"[here]({link}), [not](https://example.org/gone), `[code](gone.md)`\n")
    assert bool(broken(page)) is not leads
