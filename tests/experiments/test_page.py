"""The page of a run: whole, self-contained, escaped, and readable in a browser without network."""

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from kvprobe.experiments.page import write_page, write_views
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.experiments.study import Conclusion, Control, Study
from kvprobe.report.document import Passage
from kvprobe.report.findings import Findings
from kvprobe.report.page import picture
from kvprobe.report.plots.bars import Bars
from kvprobe.report.views import heads_view
from tests.browser import browse, needs_browser
from tests.experiments.made_up import page_of
from tests.refusals import refused

EVIL = "</title><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
TEXTS = """{% extends "study.html.j2" %}
{% block answer %}<p>{{ facts.evil }}</p>{% endblock %}
{% block results %}
{{ macros.talk(facts.chat) }}
{% call macros.table([facts.evil], facts.evil) %}{{ macros.row([facts.evil]) }}{% endcall %}
{{ macros.every("kl") }}
{% endblock %}
"""
VIEWS = """{% extends "study.html.j2" %}
{% block results %}
{{ heat("kl", "layer", "noise", facts.evil, facts.evil) }}
{{ tokens("token", "place", [facts.evil, "b"], facts.evil, label=facts.evil) }}
{{ attention(facts.view) }}
{% endblock %}
"""
HEADS = heads_view(torch.eye(2)[None, None], [EVIL, "b"], EVIL, masked=[0], index_name=EVIL)


class Line:
    file = "line"
    caption = EVIL

    def draw(self, findings: Findings, labels: Any, title: str) -> Any:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots()
        axes.plot([0, 1])
        return figure


def unmeasured(*_: Any) -> Any:
    raise AssertionError


def study_with(template: str, folder: Path) -> Study[Settings]:
    folder.mkdir()
    (folder / "page.html.j2").write_text(template)
    return Study(
        name="study",
        title=f"Title {EVIL}",
        question=EVIL,
        config=Settings,
        collect=unmeasured,
        conclude=unmeasured,
        folder=folder,
        figures=[Line()],
        labels={"noise": {"evil": EVIL}},
    )


def conclusion() -> Conclusion:
    findings = Findings()
    for layer in range(2):
        findings.number("kl", 0.5 - layer, EVIL, layer=layer, noise="evil")
        findings.number("token", 0.5 - layer, place=layer)
    chat = [vars(Passage(EVIL, EVIL, f"a 48213 b {EVIL}", masked=True, marked="48213"))]
    facts = {"evil": EVIL, "chat": chat, "view": asdict(HEADS)}
    return Conclusion(findings, [Control(EVIL, False), Control(EVIL, True)], facts, [EVIL])


def shown(template: str, folder: Path) -> tuple[Study[Settings], Path]:
    study = study_with(template, folder / "page")
    return study, page_of(study, Settings(), conclusion(), folder, drawn=True).path / "report.html"


@pytest.fixture
def page(tmp_path: Path) -> Path:
    return shown(TEXTS, tmp_path)[1]


@pytest.fixture
def viewed(tmp_path: Path) -> tuple[Study[Settings], Path]:
    return shown(VIEWS, tmp_path)


class Collector(HTMLParser):
    def __init__(self, page: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    @property
    def links(self) -> list[str | None]:
        return [value for _, attributes in self.tags for name, value in attributes.items() if name in ("src", "href")]


def test_no_text_becomes_markup(page: Path):
    tags = Collector(page).tags
    assert "script" not in {tag for tag, _ in tags}
    assert not [attributes for _, attributes in tags if any(name.startswith("on") for name in attributes)]
    assert len([tag for tag, _ in tags if tag == "img"]) == 1


def test_nothing_is_fetched(page: Path):
    (link,) = Collector(page).links
    assert str(link).startswith("data:image/png;base64,")
    assert not re.search(r"url\(|@import", page.read_text())


def test_a_masked_message_is_struck_through_and_the_hidden_text_marked(page: Path):
    assert re.search(r"<s>a <mark>48213</mark> b ", page.read_text())


def test_a_table_of_findings_with_different_keys_has_a_column_for_each(tmp_path: Path):
    every = '{% extends "study.html.j2" %}{% block results %}{{ macros.every("kl") }}{% endblock %}'
    findings = Findings()
    findings.number("kl", 1.0, layer=1_000_000)
    findings.number("kl", 2.0, layer=2, head=7)
    run = page_of(study_with(every, tmp_path / "page"), Settings(), Conclusion(findings), tmp_path)
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>.*?</tr>", run.read("report.html"), re.S)]
    assert [row[:2] for row in rows if row] == [["1000000", "–"], ["2", "7"]]


def test_a_page_without_views_may_run_no_script(page: Path):
    assert "script-src &#39;none&#39;" in page.read_text()


def test_a_page_with_views_holds_each_script_once_and_fetches_nothing(viewed: tuple[Study[Settings], Path]):
    text = viewed[1].read_text()
    assert text.count("var CircuitsVis=") == text.count("function heatMap(") == 1
    (link,) = Collector(viewed[1]).links
    assert str(link).startswith("data:image/png;base64,")
    assert not re.search(r"url\((?!#)|@import|sourceMappingURL", text)


def test_no_text_of_a_view_becomes_markup(viewed: tuple[Study[Settings], Path]):
    tags = Collector(viewed[1]).tags
    scripts = [attributes.get("type") for tag, attributes in tags if tag == "script"]
    assert sorted(scripts, key=str) == [
        None,
        None,
        None,
        None,
        *["application/json"] * 3,
        "application/octet-stream;base64",
    ]
    assert len([tag for tag, _ in tags if tag == "img"]) == 1
    assert not [attributes for _, attributes in tags if any(name.startswith("on") for name in attributes)]


@needs_browser
def test_a_browser_draws_the_views_under_the_pages_policy(viewed: tuple[Study[Settings], Path], tmp_path: Path):
    done = browse(viewed[1], tmp_path / "profile", "--dump-dom")
    # A map; all heads, and one of them small.
    assert done.stdout.count("<canvas") == 3
    assert done.stdout.count('class="panel"') == 1
    assert done.stdout.count('class="colored-tokens"') == 1
    assert "Content Security Policy" not in done.stderr


RELATED = """{% extends "study.html.j2" %}
{% block results %}
{{ heat("kl", "layer", "noise", "the KL.", "nats", panel="part") }}
{{ heat("kl", "layer", "noise", "the KL.", "nats", {"part": ["V", "none"]}, panel="part") }}
{% endblock %}
"""


def test_related_maps_share_rows_columns_and_scale(tmp_path: Path):
    study, concluded = study_with(RELATED, tmp_path / "page"), conclusion()
    findings = Findings()
    for part, size in {"K": -0.09, "V": 0.84}.items():
        findings.number("kl", size, EVIL, layer=0, noise="evil", part=part)
    findings.number("kl", 0.01, EVIL, layer=1, noise="evil", part="K")
    page = page_of(study, Settings(), replace(concluded, findings=findings), tmp_path, drawn=True).path / "report.html"
    maps = re.findall(
        r'data-component="HeatMap">.*?<script type="application/json">(.*?)</script>', page.read_text(), re.S
    )
    keys, values, alone = (json.loads(props) for props in maps)
    assert (keys["values"], values["values"]) == ([[-0.09], [0.01]], [[0.84], [None]])
    assert keys["scale"] == values["scale"] == 0.84
    assert keys["rows"] == values["rows"] == ["0", "1"]
    assert (alone["values"], alone["scale"]) == ([[0.84]], None)


def test_the_views_of_a_run_make_a_page_of_their_own(viewed: tuple[Study[Settings], Path], tmp_path: Path):
    study, page = viewed
    path = write_views(study, Run.load(page.parent))
    assert (path.parent, path.name) == (page.parent, "views.html")
    components = re.findall(r"data-component=\"(.*?)\"", path.read_text())
    assert components == ["HeatMap", "ColoredTokensMulti", "AttentionView"]
    (tmp_path / "without").mkdir()
    plain, other = shown(TEXTS, tmp_path / "without")
    refused(lambda: write_views(plain, Run.load(other.parent)), "has no views")


def test_an_unfinished_run_has_no_page(tmp_path: Path):
    run = Run.open("study", Settings(), "weights", "cpu, float32", tmp_path)
    refused(lambda: write_page(study_with(TEXTS, tmp_path / "page"), run), "unfinished")


@pytest.mark.parametrize("file", ["../secret", "/etc/passwd", "deeper/../../secret", "linked", ".."])
def test_a_picture_outside_the_run_is_never_read(page: Path, file: str):
    (page.parent / "secret.png").write_bytes(b"secret")
    (page.parent / "figures" / "deeper").mkdir()
    (page.parent / "figures" / "linked.png").symlink_to(page.parent / "secret.png")
    refused(lambda: picture(page.parent / "figures", Bars(file, "finding", "key", "label", "caption")), "not a file in")


@needs_browser
def test_a_browser_without_network_shows_the_page(page: Path, tmp_path: Path):
    shot = tmp_path / "page.png"
    seen = browse(page, tmp_path / "profile", "--dump-dom").stdout
    assert "<title>Title &lt;/title&gt;" in seen
    assert "owned'&lt;/script&gt;" in seen
    browse(page, tmp_path / "profile", f"--screenshot={shot}")
    import matplotlib.image

    pixels = matplotlib.image.imread(shot)
    assert pixels.shape[:2] == (1400, 900)
    assert pixels.std() > 0.02
