"""The report page: whole, self-contained, escaped, and readable in a browser without network."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvprobe.narrative import Figure, Passage, Report, Section, Table
from kvprobe.report import write_report
from kvprobe.runs import Run

EVIL = "</title><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@dataclass(frozen=True)
class Settings:
    seed: int = 0


@pytest.fixture
def page(tmp_path: Path) -> Path:
    import matplotlib.pyplot as plt

    from kvprobe.plots import save

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
                passages=[Passage(EVIL, EVIL, f"a 48213 b {EVIL}", struck=True, marked="48213")],
                tables=[Table([EVIL], [[EVIL]], EVIL)],
                figures=[Figure("line", EVIL)],
                points=[EVIL],
            )
        ],
    )
    run.finish({}, report.to_dict())
    return write_report(run)


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


def test_the_masked_turn_is_struck_and_the_hidden_text_marked(page: Path):
    assert re.search(r"<s>a <mark>48213</mark> b ", page.read_text())


def test_rendering_again_gives_the_same_page(page: Path):
    before = page.read_bytes()
    assert write_report(Run.load(page.parent)).read_bytes() == before


def test_an_unfinished_run_has_no_report(tmp_path: Path):
    run = Run.open("study", Settings(), "weights", "cpu, float32", tmp_path)
    with pytest.raises(ValueError, match="unfinished"):
        write_report(run)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (CI installs it: see .ci/run)")
def test_a_browser_without_network_shows_the_page(page: Path, tmp_path: Path):
    shot = tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += ["--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND"]
    options += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=900,1400"]

    def browse(*extra: str) -> str:
        command = [str(CHROMIUM), *options, *extra, page.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout

    seen = browse("--dump-dom")
    assert "<title>Title &lt;/title&gt;" in seen
    assert "owned'&lt;/script&gt;" in seen
    browse(f"--screenshot={shot}")
    import matplotlib.image

    picture = matplotlib.image.imread(shot)
    assert picture.shape[:2] == (1400, 900)
    assert picture.std() > 0.02
