"""Figures as declarations over findings: what is drawn is what was declared."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import kvprobe as kv
from kvprobe import views
from kvprobe.faults import catalogue as faults
from kvprobe.inference.model import Model
from kvprobe.memory.budget import budget
from kvprobe.policies import catalogue as policies
from kvprobe.report.document import HeatMap
from kvprobe.report.findings import Finding, Findings, Key
from kvprobe.report.plots.dots import Dots, Panel
from kvprobe.report.plots.heatmaps import Heatmaps
from kvprobe.report.plots.lines import MOST, Lines, Style
from kvprobe.report.plots.said import say
from kvprobe.report.plots.style import save
from kvprobe.stats import Estimate
from kvprobe.studies import STUDIES, find
from kvprobe.studies.features.scatter import Scatter
from kvprobe.studies.memory.stack_figure import StackFigure, stack_findings
from kvprobe.studies.policies.tradeoff import GROUPS, PANELS, POLICY_STYLES, REFERENCE, Tradeoff
from kvprobe.studies.robustness.study import FAULT_STYLES
from kvprobe.tidy import crossed
from tests.refusals import refused

ARMS, PLACES = ("kept", "masked"), ("code", "summary")
FINDINGS = Findings(
    Finding("read", {"arm": arm, "place": place, "layer": layer}, Estimate(mean, mean - 0.1, mean + 0.1, 20))
    for arm, base in zip(ARMS, (0.2, 0.6), strict=True)
    for place in PLACES
    for layer, mean in enumerate((base, base + 0.1))
)


def label(_: str, value: Key) -> str:
    return str(value)


def test_a_heat_map_has_the_declared_numbers_marks_and_edge_on_a_scale_around_its_middle():
    heatmaps = Heatmaps(
        file="f", caption="c", finding="read", rows="layer", columns="place", panel="arm", label="share",
        middle=0.5, written=".1f", marked=lambda keys: keys["layer"] == 1, edge=lambda arm, _: ARMS.index(arm),
    )  # fmt: skip
    figure = heatmaps.draw(FINDINGS, label, "t")
    assert figure is not None
    for axis, arm, numbers, up in zip(figure.axes, ARMS, (["0.2", "0.3"], ["0.6", "0.7"]), (0, 1), strict=False):
        assert axis.get_title() == arm
        assert sorted(text.get_text() for text in axis.texts) == sorted(numbers * 2)
        assert [float(line.get_ydata()[0]) for line in axis.lines] == [1.5, 1.5]
        assert set(axis.patches[0].get_data().values) == {up}
        assert axis.collections[0].get_clim() == pytest.approx((-0.3, 0.3))
    assert "0.5" in scale_of(figure)


def test_the_scale_of_a_heat_map_says_the_numbers_themselves_and_only_those_on_one_side_of_the_middle():
    heatmaps = Heatmaps(file="f", caption="c", finding="read", rows="layer", columns="place", label="l", middle=1.0,
                        panel="arm")  # fmt: skip
    figure = heatmaps.draw(FINDINGS, label, "t")
    assert figure is not None
    assert scale_of(figure)[-1] == "1"
    assert figure.axes[-1].get_ylim() == pytest.approx((-0.8, 0))


def scale_of(figure: Figure) -> list[str]:
    """What stands beside the colour bar."""
    figure.canvas.draw()
    bar = figure.axes[-1]
    low, high = bar.get_ylim()
    texts = zip(bar.get_yticks(), bar.get_yticklabels(), strict=True)
    return [text.get_text() for tick, text in texts if low <= tick <= high]


@pytest.mark.parametrize(("rows", "first"), [("layer", "below"), ("band", "below"), ("place", "above")])
def test_layers_go_upward_and_other_rows_downward_in_figures_and_on_pages_alike(rows: str, first: str):
    findings = Findings(
        Finding("read", {rows: row, "head": head, "part": part}, Estimate(row + head / 10))
        for part in "KV"
        for row in (0, 1)
        for head in (0, 1, 2)
    )
    look = {"rows": rows, "columns": "head", "panel": "part", "label": "share"}
    figure = Heatmaps(file="f", caption="c", finding="read", **look).draw(findings, label, "t")
    assert figure is not None
    for axis in figure.axes[:2]:
        assert [text.get_text() for text in axis.get_yticklabels()] in (["0", "1"], [])
        low, high = axis.transData.transform([(0.5, 0.5), (0.5, 1.5)])[:, 1]
        assert (low < high) == (first == "below")
    props = views.heat_map(HeatMap("", ["0", "1"], ["0"], [[0], [1]], "", rows, "head"))
    assert f'"upward":{str(first == "below").lower()}' in props


def test_dots_of_the_declared_values_stand_one_below_the_other_beside_their_level():
    known: dict[str, Any] = {"finding": "read", "down": "place", "line": "arm", "where": {"layer": 1}}
    styles = {"masked": Style("black"), "kept": Style("red", "s")}
    level = ("kept, code, layer 0", "read", {"arm": "kept", "place": "code", "layer": 0})
    one = Panel(styles=styles, label="share", level=level, **known)
    other = Panel(styles={"kept": Style("red")}, label="share", **known)
    figure = Dots("f", "c", (one, other)).draw(FINDINGS, label, "t")
    assert figure is not None
    left, right = figure.axes
    assert [text.get_text() for text in left.get_yticklabels()] == list(PLACES)
    assert [list(dots.lines[0].get_xdata()) for dots in left.containers] == [
        pytest.approx([mean] * 2) for mean in (0.7, 0.3)
    ]
    assert left.lines[-1].get_xdata()[0] == 0.2
    assert len(right.containers) == 1
    assert Dots("f", "c", (one,)).draw(Findings(), label, "t") is None


def test_a_scatter_has_a_point_for_each_pair_above_zero_and_colours_those_that_are_decided():
    known: dict[str, Any] = {"segment": "T3", "place": "v.7"}
    findings = Findings()
    for latent, (across, up) in {"a": (1.0, 2.0), "b": (3.0, 1.0), "c": (0.0, 1.0)}.items():
        findings.number("restart", across, latent=latent, **known)
        findings.number("retained", up, latent=latent, **known)
    findings.number("retained", 1.0, latent="d", **known)
    findings.number("p", 0.01, latent="b", **known)
    figure = Scatter().draw(findings, label, "t")
    assert figure is not None
    points = [dots.get_offsets().tolist() for dots in figure.axes[0].collections]
    assert points == [[[1.0, 2.0]], [[3.0, 1.0]]]


def test_lines_without_a_key_for_panels_have_one_panel_of_the_chosen_findings():
    known: dict[str, Any] = {"file": "f", "caption": "c", "finding": "read", "x_label": "layer", "y_label": "share"}
    lines = Lines(x="layer", line="arm", where={"place": ("summary",)}, curves=True, **known)
    figure = lines.draw(FINDINGS, label, "t")
    assert figure is not None
    [axis] = figure.axes
    drawn = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
    assert drawn == {"kept": pytest.approx([0.2, 0.3]), "masked": pytest.approx([0.6, 0.7])}


def test_numbers_that_have_no_logarithm_stand_at_their_own_places():
    known: dict[str, Any] = {"file": "f", "caption": "c", "finding": "read", "x_label": "layer", "y_label": "share"}
    figure = Lines(x="layer", line="arm", where={"place": ("summary",)}, **known).draw(FINDINGS, label, "t")
    assert figure is not None
    assert figure.axes[0].get_xticks().tolist() == [0, 1]


def test_a_figure_is_written_under_its_whole_name(tmp_path: Path):
    for name in ("kl_v.7", "kl_v.8"):
        save(plt.figure(), tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kl_v.7.png", "kl_v.7.svg", "kl_v.8.png", "kl_v.8.svg"]


@pytest.mark.usefixtures("unchecked")
def test_a_leak_has_a_curve_for_each_split_and_kv_head():
    def curves(read: str, head: Any, floor: float | None = None) -> dict[Any, int]:
        keys = {"family": ["v"], "split": ["random", "paired"], "head": head, "layer": [0, 1, 2]}
        table = crossed(keys, {}).assign(read=read, accuracy=0.3, low=0.2, high=0.4, floor=floor)
        probing: Any = type("Probing", (SimpleNamespace,), {})(df=lambda: table.astype({"head": "Int64"}), chance=0.1)
        return {line.get_label(): len(list(line.get_xdata())) for line in kv.plots.leak(probing).axes[0].lines[:-1]}

    whole = {"random": 3, "paired": 3}
    assert curves("mean", [None]) == curves("slot", [None]) == whole
    assert curves("mean", [None], 0.15) == whole | {f"{split}: restart": 3 for split in whole}
    assert curves("mean", [0, 1]) == {f"{split}, KV head {head}": 3 for split in whole for head in (0, 1)}
    refused(lambda: curves("last", [None]), "no curve over layers")


def test_what_plots_lists_are_plots_and_not_modules():
    assert dir(kv.plots) == sorted(kv.plots.__all__)
    assert not any(isinstance(getattr(kv.plots, name), ModuleType) for name in dir(kv.plots))


HEADS = pd.DataFrame([(layer, head, layer - head / 2) for layer in (0, 1, 4) for head in (0, 1)])
HEADS = HEADS.set_axis(["layer", "head", "gain"], axis=1)


@pytest.mark.parametrize(("backend", "left_open"), [("inline", 0), ("agg", 1)])
def test_a_notebook_is_left_one_figure_to_show_and_goes_on_showing_those_of_the_user(
    backend: str, left_open: int, monkeypatch: pytest.MonkeyPatch
):
    plt.close("all")
    plt.ioff()
    monkeypatch.setattr(plt, "get_backend", lambda: backend)
    subplots = plt.subplots

    def first_figure(*args: Any, **named: Any) -> Any:
        plt.ion()  # as the inline backend does when it is loaded
        return subplots(*args, **named)

    monkeypatch.setattr(plt, "subplots", first_figure)
    figure = kv.plots.by_head(HEADS, "gain")
    assert figure.axes
    assert len(plt.get_fignums()) == left_open
    assert plt.isinteractive()
    plt.ioff()
    plt.close("all")


def test_a_map_of_heads_has_their_numbers_on_a_scale_from_or_around_zero():
    drawn = kv.plots.by_head(HEADS, "gain", "share").axes[0].collections[0]
    assert drawn.get_array().tolist() == [[0, 1, 4], [-0.5, 0.5, 3.5]]
    assert drawn.get_clim() == (-4, 4)
    assert kv.plots.by_head(HEADS.query("gain >= 0"), "gain").axes[0].collections[0].get_clim() == (0, 4)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (HEADS.rename(columns={"gain": "gains"}), "There is no column called 'gain'; did you mean 'gains'?"),
        (pd.concat([HEADS, HEADS]), "The table has several rows for a layer and head; choose one of them"),
    ],
)
def test_a_table_without_one_number_for_each_head_is_refused(table: pd.DataFrame, sentence: str):
    with pytest.raises(kv.UserError) as refused:
        kv.plots.by_head(table, "gain")
    assert str(refused.value).startswith(sentence)


def test_a_figure_of_replies_has_the_probability_of_each_token_in_every_arm(tiny_llama: Model):
    chat = kv.Transcript.from_messages(
        [{"role": role, "content": "a shed"} for role in ("system", "user", "assistant")], ["s", "u", "a"]
    )
    compared = kv.compare(tiny_llama, chat, ["u"], "a mill", max_new_tokens=3)
    axis = kv.plots.replies(compared).axes[0]
    expected = np.exp([reply.logprobs for reply in compared.replies.values()])
    assert np.allclose(axis.collections[0].get_array(), expected)
    assert [text.get_text() for text in axis.get_yticklabels()] == list(compared.replies)


def test_every_named_fault_and_policy_has_a_line_style_of_its_own():
    for styles, catalogue in ((FAULT_STYLES, faults.CATALOGUE), (POLICY_STYLES, policies.CATALOGUE)):
        assert styles.keys() == catalogue.keys()
        assert len(set(styles.values())) == len(styles)


def test_a_tradeoff_draws_quality_against_the_memory_of_the_same_condition():
    findings = Findings()
    for kind, level, memory, quality in (
        ("full", 100, 1, 0.9),
        ("random", 1, 0.2, 0.3),
        ("random", 2, 0.5, 0.8),
        ("quantise", 4, 0.3, 0.1),
    ):
        findings.number("memory", memory, kind=kind, level=level)
        for measure in PANELS:
            value = 1 - quality if measure == "kl" else quality
            mean = Estimate(value, value - 0.1, value + 0.1, 9)
            findings.add(Finding("quality", {"kind": kind, "level": level, "measure": measure}, mean))
        findings.add(
            Finding("log_kl", {"kind": kind, "level": level}, Estimate(-quality, -quality - 1, -quality + 1, 9))
        )
    findings.number("chance", 0.05, measure="code")
    figure = Tradeoff().draw(findings, label, "t")
    divergence, _, right, _ = figure.axes
    assert (divergence.get_yscale(), right.get_yscale()) == ("log", "linear")
    distances = {dots.get_label(): dots.lines[0].get_xydata().tolist() for dots in divergence.containers}
    assert distances["random"] == [[20, pytest.approx(np.exp(-0.3))], [50, pytest.approx(np.exp(-0.8))]]
    shown = {dots.get_label(): dots for dots in right.containers}
    assert shown["random"].lines[0].get_xydata().tolist() == [[20, 0.3], [50, 0.8]]
    assert [bar[:, 1].tolist() for bar in shown["random"].lines[2][0].get_segments()] == [
        pytest.approx([mean - 0.1, mean + 0.1]) for mean in (0.3, 0.8)
    ]
    levels = {line.get_label(): line.get_ydata()[0] for line in right.lines}
    assert (levels["full"], levels["chance"]) == (0.9, 0.05)
    assert [[text.get_text() for text in axis.texts] for axis in (divergence, right)] == [["4"], []]
    assert said_of(figure) == "t\nn = 9, 95 % intervals; one scale in each row"


def test_every_policy_has_one_panel_beside_the_reference_and_none_has_more_lines_than_can_be_told_apart():
    shown = [kind for kinds in GROUPS.values() for kind in kinds]
    assert sorted([*shown, REFERENCE]) == sorted(policies.CATALOGUE)
    assert max(map(len, GROUPS.values())) < MOST


def said_of(figure: Figure) -> str:
    return str(figure.get_suptitle()).replace("\u00a0", " ")


def share(mean: float, low: float, high: float, **keys: Key) -> Finding:
    return Finding("share", keys, Estimate(mean, low, high, 9))


SHARES: dict[str, Any] = {"file": "f", "caption": "c", "finding": "share", "x": "x", "y_label": "y"}


def test_what_panels_rest_on_is_said_once_or_for_each_with_its_letter():
    one, other = Estimate(0.5, 0.4, 0.6, 48), Estimate(0.5, 0.4, 0.6, 12)
    by_range = Estimate(0.5, clusters=3, smallest=0.1, largest=0.9)

    def said(*shown: list[Finding]) -> str:
        figure, axes = plt.subplots(1, len(shown), squeeze=False)
        panels = list(zip(axes[0], shown, strict=True))
        say(figure, panels, lambda key, value: f"{value} {key}-things", "t", "", "more")
        letters = [axis.get_title(loc="left") for axis in axes[0]]
        assert letters == (list("abc")[: len(shown)] if len(shown) > 1 else [""])
        return " ".join(said_of(figure).split("\n"))

    plain, small = Finding("a", {}, one), Finding("b", {}, other)
    assert said([plain]) == said([plain], [plain]) == "t n = 48 n-things, 95 % intervals; more"
    assert said([plain], [small], [plain]) == (
        "t a, c: n = 48 n-things, 95 % intervals; b: n = 12 n-things, 95 % intervals; more"
    )
    assert said([plain], [plain], [small]).startswith("t a–b: n = 48 n-things, 95 % intervals; c: n = 12")
    held = Finding("c", {}, one, comparisons=9)
    assert said([held]) == "t n = 48 n-things, 95 % intervals (together over 9 claims); more"
    assert said([held, small]) == "t n = 12 to 48 n-things, 95 % intervals (some together over 9 claims); more"
    assert said([Finding("d", {}, by_range)]) == "t n = 3 n-things, ranges from the smallest to the largest; more"
    assert said([Finding("e", {}, Estimate(0.5))]) == "t more"
    plt.close("all")


@pytest.mark.parametrize("name", STUDIES)
def test_figures_of_every_study_say_what_they_count(name: str):
    assert find(name).declaration.label("n", "9") != "9"


def test_many_lines_are_shared_out_among_panels_one_below_the_other():
    lines = "abcdefghi"
    found = Findings(share(0.5, 0.4, 0.6, line=line, x=x) for line in lines for x in (1, 2))
    figure = Lines(line="line", styles={"i": Style("red")}, curves=True, **SHARES).draw(found, label, "t")
    assert figure is not None
    assert [[line.get_label() for line in axis.lines] for axis in figure.axes] == [list("iabcd"), list("efgh")]
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()


def test_no_number_lies_beyond_limits_and_that_an_interval_does_is_said():
    limited = Lines(curves=True, limits=(0.0, 1.0), **SHARES)
    figure = limited.draw(Findings([share(1.4, -0.2, 1.4, x=1), share(0.5, 0.2, 0.6, x=2)]), label, "t")
    assert figure is not None
    assert figure.axes[0].get_ylim() == (0.0, 1.4)
    assert not any(line.get_clip_on() for line in figure.axes[0].lines)
    assert said_of(figure).endswith("; intervals that reach the lower edge go on beyond it")
    inside = limited.draw(Findings([share(0.5, 0.2, 0.6, x=x) for x in (1, 2)]), label, "t")
    assert inside is not None
    assert "beyond" not in said_of(inside)


def test_what_a_number_can_be_at_most_and_named_rules_stand_in_the_legend():
    lines = Lines(curves=True, rules={0.1: "chance", 0.2: ""}, most=(lambda x: 2 * x, "all"), **SHARES)
    figure = lines.draw(Findings(share(0.5, 0.4, 0.6, x=x) for x in (2, 1)), label, "t")
    assert figure is not None
    drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in figure.axes[0].lines}
    assert drawn["all"] == [[1, 2], [2, 4]]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["chance", "all"]


def test_no_dot_lies_beyond_limits_and_that_an_interval_does_is_said():
    panel = Panel(
        finding="share", down="x", line="x", styles={1: Style("k"), 2: Style("r")}, label="", limits=(0.0, 1.0)
    )
    figure = Dots("f", "c", (panel,)).draw(Findings([share(1.4, 1.2, 9.0, x=1), share(0.5, 0.2, 0.6, x=2)]), label, "t")
    assert figure is not None
    assert figure.axes[0].get_xlim() == (0.0, 1.4)
    assert said_of(figure).endswith("; intervals that reach the right edge go on beyond it")


def test_points_stand_side_by_side_only_for_their_intervals():
    def places(low: float, high: float, moved: bool) -> list[list[float]]:
        found = Findings(share(0.5, low, high, line=line, x=x) for line in "ab" for x in (1, 2))
        figure = Lines(line="line", **SHARES).draw(found, label, "t")
        assert figure is not None
        assert ("points of one x stand side by side" in said_of(figure)) == moved
        return [np.exp(dots.lines[0].get_xdata()).tolist() for dots in figure.axes[0].containers]

    assert places(0.5, 0.5, moved=False) == [pytest.approx([1, 2])] * 2
    first, second = places(0.4, 0.6, moved=True)
    assert first[0] < 1 < second[0]


@pytest.mark.parametrize("curves", [True, False])
def test_an_interval_down_to_zero_has_no_floor_on_a_logarithmic_axis(curves: bool):
    found = Findings([share(0.5, 0.0, 0.9, x=1), share(0.4, 0.1, 0.6, x=2)])
    figure = Lines(curves=curves, log=True, **SHARES).draw(found, label, "t")
    assert figure is not None
    [axis] = figure.axes
    assert axis.get_ylim()[0] == pytest.approx(0.1 / 1.5)
    ends = axis.collections[0].get_paths()[0].vertices[:, 1]
    assert min(ends) == 0.0
    assert len(axis.images) == curves, "a shade fades"
    assert "lower edge go on beyond it" in said_of(figure)


def test_dots_of_one_unit_have_one_scale_and_a_legend_says_on_how_many_each_rests():
    found = Findings(
        Finding(name, {"place": place, "arm": arm}, Estimate(mean, mean - 0.1, mean + 0.1, count))
        for name, mean in (("a", 0.2), ("b", 0.8), ("c", 5.0))
        for place in PLACES
        for arm, count in zip(ARMS, (12, 24), strict=True)
    )
    look: dict[str, Any] = {"down": "place", "line": "arm", "styles": {arm: Style("red") for arm in ARMS}}
    scales = {"a": "share", "b": "share", "c": ""}
    panels = tuple(Panel(finding=name, label=name, scale=scale, **look) for name, scale in scales.items())
    figure = Dots("f", "c", panels).draw(found, label, "t")
    assert figure is not None
    first, second, third = (axis.get_xlim() for axis in figure.axes)
    assert first == second
    assert first[0] < 0.1 < 0.9 < first[1] < third[0]
    assert "one scale: a, b" in said_of(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["kept (n = 12)", "masked (n = 24)"]
    assert [axis.get_xscale() for axis in figure.axes] == ["linear"] * 3
    logarithmic = Dots("f", "c", (replace(panels[0], log=True),)).draw(found, label, "t")
    assert logarithmic is not None
    assert logarithmic.axes[0].get_xscale() == "log"
    four = Dots("f", "c", (*panels, panels[0])).draw(found, label, "t")
    assert four is not None
    assert [axis.axison for axis in four.axes] == [True] * 4 + [False] * 2


def test_a_budget_is_drawn_again_from_its_findings():
    plan = budget("smollm2-135m", context=64, memory="1GiB")
    findings = Findings(stack_findings(plan, "context", points=5))
    findings.number("measured", 3e8, context=64, what="peak")
    figure = StackFigure(file="f", caption="c", along="context", measured=True).draw(findings, label, "t")
    assert figure is not None
    dots, usable, out = figure.axes[0].lines
    assert dots.get_xydata().tolist() == [[64, 0.3]]
    assert usable.get_ydata()[0] == pytest.approx(findings.at("usable", along="context").mean / 1e9)
    assert out.get_xdata()[0] == plan.largest_context
    assert StackFigure(file="f", caption="c", along="new").draw(findings, label, "t") is None


def test_a_legend_names_only_what_no_row_above_has_named():
    values = {"a": 0.1, "b": 0.2}
    found = [
        Finding("share", {"row": row, "line": line, "x": x}, Estimate(values[line], 0.0, 0.3, 9))
        for row, lines in (("one", "a"), ("two", "ab"), ("three", "ab"))
        for line in lines
        for x in (1, 2)
    ]
    known: dict[str, Any] = {"file": "f", "caption": "c", "finding": "share", "x": "x", "y_label": "y"}
    lines = Lines(line="line", row=lambda keys: str(keys["row"]), curves=True, **known)
    figure = lines.draw(Findings(found), label, "t")
    assert figure is not None
    legends = [axis.get_legend() for axis in figure.axes]
    assert [legend and [text.get_text() for text in legend.get_texts()] for legend in legends] == [["a"], ["b"], None]


def test_limits_that_panels_share_hold_the_numbers_of_each():
    found = Findings(
        Finding("share", {"x": x, "panel": panel}, Estimate(mean, mean, mean, 12))
        for panel, mean in (("a", -2.0), ("b", 0.5))
        for x in (1, 2)
    )
    figure = Lines(
        file="f", caption="c", finding="share", x="x", line="", panel="panel", limits=(-1.0, 1.0), y_label=""
    ).draw(found, label, "t")
    assert figure is not None
    assert [axis.get_ylim() for axis in figure.axes] == [(-2.0, 1.0)] * 2
