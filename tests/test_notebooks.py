"""Notebooks run, say what their outputs support, and have the outputs that running them gives."""

import re
from html import unescape
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jupytext
import matplotlib
import matplotlib.pyplot as plt
import nbformat
import pytest
from matplotlib.figure import Figure

from tests.as_printed import run_code

matplotlib.use("Agg")
FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = [file for file in sorted(FOLDER.glob("*.py")) if file.name != "execute.py"]
MOST_SHOWN = 5_000
"""Characters that a cell may show, without its figures."""
LARGEST = 150_000
"""Bytes of a notebook, with its figures."""


def cells_of(notebook: Path) -> list[Any]:
    return nbformat.read(notebook.with_suffix(".ipynb"), as_version=4).cells


def shown(value: Any) -> str:
    """What a notebook shows of a value, as HTML or text."""
    if value is None:
        return ""
    return getattr(value, "_repr_html_", lambda: None)() or repr(value)


def stored_text(cell: Any) -> str:
    """What a stored cell shows, without its figures."""
    printed = "".join(output["text"] for output in cell.outputs if output["output_type"] == "stream")
    values = [output["data"] for output in cell.outputs if output["output_type"] == "execute_result"]
    return printed + "".join(data.get("text/html", data["text/plain"]) for data in values)


def stored_figures(cell: Any) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.outputs)


def is_same(one: str, other: str) -> bool:
    """Whether two outputs have the same words and whole numbers, and about the same other numbers outside intervals.

    Another processor may round differently, which can move a probe's prediction of a conversation or two: of ten
    conversations, that can make an interval another one altogether.
    """
    return all(_is_same_word(*pair) for pair in zip_longest(_words(one), _words(other), fillvalue=""))


def _words(text: str) -> list[str]:
    plain = unescape(re.sub(r"<style.*?</style>|<[^>]+>", " ", text, flags=re.DOTALL))
    plain = re.sub(r"\([+-]?[\d.]+ to [+-]?[\d.]+\)", "(interval)", plain)
    return re.findall(r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?|[^\W\d]\w*|\S", plain)


def _is_same_word(one: str, other: str) -> bool:
    if one == other:
        return True
    try:
        first, second = float(one), float(other)
    except ValueError:
        return False
    decimals = max(len(number.partition(".")[2]) for number in (one, other))
    return decimals > 0 and abs(first - second) <= (8 if decimals == 1 else 0.05) + 0.1 * max(abs(first), abs(second))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs_and_its_reading_and_outputs_hold(
    notebook: Path, namespace: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    plt.close("all")
    for number, cell in enumerate(cells_of(notebook)):
        if cell.cell_type == "code":
            value = run_code(cell.source, f"{notebook.name}, cell {number}", namespace)
            text = capsys.readouterr().out + shown(value)
            assert len(text) < MOST_SHOWN, cell.source
            assert is_same(text, stored_text(cell)), f"{text}\nis not what is stored:\n{stored_text(cell)}"
            assert stored_figures(cell) == len(plt.get_fignums()), cell.source
            assert stored_figures(cell) or not isinstance(value, Figure), cell.source
            plt.close("all")
    READINGS[notebook.stem](namespace)


def comparing_loses_the_code(names: dict[str, Any]) -> None:
    assert [arm for arm, reply in names["comparison"].replies.items() if "48213" in reply.text] == ["full"]
    full, masked = (
        names["estimate"](values.diagonal() - (values.sum(0) - values.diagonal()) / (len(values) - 1))
        for values in names["asked_of"].values()
    )
    assert full.low > 10
    assert masked.low < 0 < masked.high < 0.5


def patching_finds_one_head(names: dict[str, Any]) -> None:
    effects = names["patched"].df().set_index(["part", "layer", "segment"])["normalised"]
    assert effects.idxmax() == ("V", 23, "fact")
    assert effects["K"].abs().max() < 0.05
    assert effects[:, :, "reply"].abs().max() < 0.01
    table = names["slots"].df().set_index(["text", "head"])["normalised"]
    assert table.nlargest(2).index[0] == ("4", 0)
    assert table.nlargest(2).iloc[1] < 0.01
    held_out = names["summary"].set_index(["layer", "head"])
    assert held_out["normalised_low"][23, 0] > 0.5
    assert held_out["normalised"].drop((23, 0)).max() < 0.02


def probing_reads_what_is_hardly_used(names: dict[str, Any]) -> None:
    assert str(names["probing"]).splitlines()[0].startswith("random: decodable")
    assert str(names["probing"]).splitlines()[2].startswith("paired: decodable")
    used = names["probing"].use.groupby("condition")["margin"].mean()
    assert 0 < used["retained"] < 0.1 * used["full"]
    right = names["probing"].use.groupby("condition")["token_accuracy"].mean()
    assert right["full"] == 1
    assert right["retained"] <= right["restart"] + 0.05


def attention_points_to_heads_that_matter(names: dict[str, Any]) -> None:
    assert names["lost"]["dangling"].mean() < names["share"]
    means = names["answered"].mean()
    assert means["3 that lose most"] < means["all"] + 0.15
    assert means["3 at random"] > 0.8 * means["none"]


READINGS = {
    "attention_after_masking": attention_points_to_heads_that_matter,
    "mask_and_compare": comparing_loses_the_code,
    "patch_a_fact": patching_finds_one_head,
    "probe_your_own_secret": probing_reads_what_is_hardly_used,
}
"""What the text of each notebook says of its results."""


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_has_the_cells_of_its_source_in_one_small_file(notebook: Path):
    source, written = jupytext.read(notebook).cells, cells_of(notebook)
    assert [(cell.cell_type, cell.source) for cell in written] == [(cell.cell_type, cell.source) for cell in source]
    assert notebook.with_suffix(".ipynb").stat().st_size < LARGEST


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("L23 of 85 slots: 0.703 (61.9 to 75.6)", "L23 of 85 slots: 0.699 (62.5 to 73.0)", True),
        ("<td>-0.000</td>", "<td>0.0</td>", True),
        ("85 slots", "86 slots", False),
        ("L23H0", "L22H0", False),
        ("0.703", "0.503", False),
        ("61.9", "42.0", False),
        ("decodable", "not detected", False),
        ("one", "one more", False),
    ],
)
def test_outputs_are_the_same_up_to_rounding(one: str, other: str, same: bool):
    assert is_same(one, other) is same
