"""The report page: whole, self-contained, escaped, and readable in a browser without network."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.report.document import Figure, HeatMap, Passage, Report, Section, Table, TokenView
from kvprobe.report.page import write_report, write_views
from kvprobe.report.views import heads_view
from tests.browser import browse, needs_browser
from tests.refusals import refused

EVIL = "</title><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    import matplotlib.pyplot as plt

    from kvprobe.report.plots import save

    run = Run.open("study", Settings(), "weights", "cpu, float32", tmp_path)
    figure, axes = plt.subplots()
    axes.plot([0, 1])
    save(figure, run.path / "figures" / "line")
    report = Report(
        title=f"Title {EVIL}",
        question=f"Question {EVIL}",
        answer=f"Answer {EVIL}",
        warnings=[EVIL],
        sections=[
            Section(
                title=EVIL,
                paragraphs=[EVIL],
                passages=[Passage(EVIL, EVIL, f"a 48213 b {EVIL}", masked=True, marked="48213")],
                tables=[Table([EVIL], [[EVIL]], EVIL)],
                figures=[Figure("line", EVIL)],
                points=[EVIL],
            )
        ],
    )
    run.finish({}, report.to_dict())
    return write_report(run.path, run.report)


GRID = HeatMap(EVIL, [EVIL, "1"], [EVIL], [[0.5], [None]], EVIL, EVIL, EVIL)
TOKENS = TokenView(EVIL, [EVIL, "b"], [EVIL], [[0.5, -1.0]])
HEADS = heads_view(torch.eye(2)[None, None], [EVIL, "b"], EVIL, masked=[0], index_name=EVIL)


@pytest.fixture
def viewed(tmp_path: Path) -> Path:
    """A report with views in two sections."""
    run = Run.open("study", Settings(), "weights", "cpu, float32", tmp_path, "viewed")
    (run.path / "figures" / "dot.png").write_bytes(b"")
    sections = [Section("First", figures=[Figure("dot", "")], maps=[GRID], views=[TOKENS] * 2)]
    run.finish(
        {}, Report("Viewed", "q", "a", sections=[*sections, Section("Second", maps=[GRID], heads=[HEADS])]).to_dict()
    )
    return write_report(run.path, run.report)


class Collector(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_no_text_becomes_markup(page: Path):
    parser = Collector()
    parser.feed(page.read_text())
    assert "script" not in {tag for tag, _ in parser.tags}
    assert not [attributes for _, attributes in parser.tags if any(name.startswith("on") for name in attributes)]
    assert len([tag for tag, _ in parser.tags if tag == "img"]) == 1


def test_nothing_is_fetched(page: Path):
    text = page.read_text()
    parser = Collector()
    parser.feed(text)
    links = [value for _, attributes in parser.tags for name, value in attributes.items() if name in ("src", "href")]
    assert links
    assert all(link is not None and link.startswith("data:image/png;base64,") for link in links)
    assert "url(" not in text
    assert "@import" not in text


def test_a_masked_message_is_struck_through_and_the_hidden_text_marked(page: Path):
    assert re.search(r"<s>a <mark>48213</mark> b ", page.read_text())


def test_a_page_without_views_may_run_no_script(page: Path):
    assert "script-src &#39;none&#39;" in page.read_text()


def test_maps_and_views_follow_the_figures_of_their_section(viewed: Path):
    order = re.findall(r"<h2>(.*?)</h2>|<img src=\"(data)|data-component=\"(.*?)\"", viewed.read_text())
    titles = ["".join(groups) for groups in order]
    assert titles == [
        "First",
        "data",
        "HeatMap",
        "ColoredTokensMulti",
        "ColoredTokensMulti",
        "Second",
        "HeatMap",
        "AttentionView",
    ]


def test_a_page_with_views_holds_each_script_once_and_fetches_nothing(viewed: Path):
    text = viewed.read_text()
    assert text.count("var CircuitsVis=") == 1
    assert text.count("function heatMap(") == 1
    parser = Collector()
    parser.feed(text)
    links = [value for _, attributes in parser.tags for name, value in attributes.items() if name in ("src", "href")]
    assert len(links) == 1
    assert str(links[0]).startswith("data:image/png;base64,")
    assert not re.search(r"url\(|@import|sourceMappingURL", text)


def test_no_text_of_a_view_becomes_markup(viewed: Path):
    parser = Collector()
    parser.feed(viewed.read_text())
    scripts = [attributes.get("type") for tag, attributes in parser.tags if tag == "script"]
    assert sorted(scripts, key=str) == [None, None, None, *["application/json"] * 5, "application/octet-stream;base64"]
    assert len([tag for tag, _ in parser.tags if tag == "img"]) == 1
    assert not [attributes for _, attributes in parser.tags if any(name.startswith("on") for name in attributes)]


@needs_browser
def test_a_browser_draws_the_views_under_the_pages_policy(viewed: Path, tmp_path: Path):
    done = browse(viewed, tmp_path / "profile", "--dump-dom")
    # Two maps, and the small and the large pattern of one head.
    assert done.stdout.count("<canvas") == 4
    assert done.stdout.count('class="colored-tokens"') == 2
    assert "<title>Viewed</title>" in done.stdout
    assert "Content Security Policy" not in done.stderr


def test_a_report_without_maps_and_views_loads():
    data = Report("t", "q", "a", sections=[Section("s")]).to_dict()
    del data["sections"][0]["maps"], data["sections"][0]["views"], data["sections"][0]["heads"]
    (section,) = Report.from_dict(data).sections
    assert not [*section.maps, *section.views, *section.heads]


def test_maps_and_views_come_back_from_a_report_as_they_were():
    section = Section("s", maps=[GRID], views=[TOKENS], heads=[HEADS])
    (back,) = Report.from_dict(Report("t", "q", "a", sections=[section]).to_dict()).sections
    assert (back.maps, back.views, back.heads) == ([GRID], [TOKENS], [HEADS])


def test_the_views_of_a_run_make_a_page_of_their_own(viewed: Path, page: Path):
    path = write_views(viewed.parent, Run.load(viewed.parent).report)
    assert (path.parent, path.name) == (viewed.parent, "views.html")
    shown = re.findall(r"data-component=\"(.*?)\"", path.read_text())
    assert shown == ["HeatMap", "ColoredTokensMulti", "ColoredTokensMulti", "HeatMap", "AttentionView"]
    refused(lambda: write_views(page.parent, Run.load(page.parent).report), "has no views")


def test_rendering_again_gives_the_same_page(page: Path):
    before = page.read_bytes()
    assert write_report(page.parent, Run.load(page.parent).report).read_bytes() == before


def test_an_unfinished_run_has_no_report(tmp_path: Path):
    run = Run.open("study", Settings(), "weights", "cpu, float32", tmp_path)
    refused(lambda: write_report(run.path, run.report), "unfinished")


@needs_browser
def test_a_browser_without_network_shows_the_page(page: Path, tmp_path: Path):
    shot = tmp_path / "page.png"
    seen = browse(page, tmp_path / "profile", "--dump-dom").stdout
    assert "<title>Title &lt;/title&gt;" in seen
    assert "owned'&lt;/script&gt;" in seen
    browse(page, tmp_path / "profile", f"--screenshot={shot}")
    import matplotlib.image

    picture = matplotlib.image.imread(shot)
    assert picture.shape[:2] == (1400, 900)
    assert picture.std() > 0.02
