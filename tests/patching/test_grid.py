"""Which cells a grid has, and how they are named and shown."""

import json
from collections.abc import Sequence
from typing import Any

import torch

import kvprobe as kv
from kvprobe.inference.model import Model
from kvprobe.patching import LogitDiff
from tests.patching.pairs import SPANS, near, swept, two
from tests.refusals import refused


def test_a_grid_is_the_product_of_its_axes_and_unnamed_axes_are_whole(tiny_llama: Model):
    base, donor = two(tiny_llama)
    base.read({"T3": 2}, padding=2)
    donor.read({"T3": 2})
    base.mask([1])
    live = [0, *range(2, 15)]
    segments = {"system": (0, 1, 2, 3), "T1": (4, 5, 6, 7, 8, 9), "T2": (10, 11, 12), "T3": (13, 14)}
    heads, layers = (0, 1), (0, 1, 2)

    def cells(over: Any, parts: Sequence[str] = ("KV",)) -> list[tuple[Any, ...]]:
        patched = swept(base, donor, base.suffix(0, 1), over=over, parts=parts)
        return [
            (cell.layers, cell.slots, heads if cell.kv_heads is None else cell.kv_heads, cell.part)
            for cell in patched.cells
        ]

    assert cells(("layer", "slot")) == [((layer,), (slot,), heads, "KV") for layer in layers for slot in live]
    assert cells({"slot": [1, 0]}) == [(layers, (slot,), heads, "KV") for slot in (1, 0)]
    assert cells(("head", "segment"), ("V", "K")) == [
        (layers, slots, (head,), part) for head in heads for slots in segments.values() for part in "VK"
    ]
    assert cells({"band": [range(1, 3), [0, 2]], "segment": ["T3", "T1"]}) == [
        (band, segments[name], heads, "KV") for band in ((1, 2), (0, 2)) for name in ("T3", "T1")
    ]
    assert {layers for layers, *_ in cells(("band",))} == {(0,), (1,), (2,)}


def test_parts_named_by_their_hooks_are_these_parts_at_these_layers(tiny_llama: Model):
    base, donor = two(tiny_llama)
    suffix = base.suffix(0, 2)
    names = ["blocks.2.attn.hook_v", "blocks.0.attn.hook_rot_k", "blocks.2.attn.hook_rot_k"]
    for over in (("segment",), ("layer", "segment"), ("segment", "layer")):
        hooked = swept(base, donor, suffix, over=over, parts=names)
        axes = over if "layer" in over else ("layer", *over)
        known = swept(base, donor, suffix, over=axes, parts=("V", "K")).df()
        table = hooked.df()
        assert set(zip(table["layer"], table["part"], strict=True)) == {(2, "V"), (0, "K"), (2, "K")}
        assert len(table) == 3 * len(SPANS)
        matched = table.merge(known, on=["layer", "segment", "part"])
        assert len(matched) == len(table)
        assert near(matched["value_x"].to_numpy(), matched["value_y"].to_numpy())
    scores = kv.attribute(
        tiny_llama, base.cache, donor.cache, suffix, LogitDiff(1, 2), ("segment",), parts=names[:1], check=1
    )
    assert scores.df()[["layer", "part"]].drop_duplicates().values.tolist() == [[2, "V"]]


def test_an_attribution_checks_at_least_one_cell_with_a_seed_that_there_is(tiny_llama: Model):
    base, donor = two(tiny_llama)
    for name, value in (("check", 0), ("seed", -1)):
        refused(
            lambda given={name: value}: kv.attribute(
                tiny_llama, base.cache, donor.cache, base.suffix(0, 1), LogitDiff(1, 2), ("segment",), **given
            ),
            f"{name}={value}, an int; give a whole number of at least",
        )


def test_a_subspace_may_be_named_by_its_hook(tiny_llama: Model):
    base, donor = two(tiny_llama)
    direction = torch.randn(1, tiny_llama.geometry.n_kv_heads * tiny_llama.geometry.d_head)
    one, other = (
        swept(base, donor, base.suffix(0, 1), over=("layer",), parts=("V",), along={name: direction})
        for name in ((1, "V"), "blocks.1.attn.hook_v")
    )
    assert near(one.values, other.values)


def test_a_matrix_says_which_part_it_is_of(tiny_llama: Model):
    base, donor = two(tiny_llama)
    patched = swept(base, donor, base.suffix(0, 2), over=("segment",), parts=("V", "K"))
    table = patched.df()
    assert patched.matrix("part", "segment", value="value").stack().tolist() == [
        value for part in "VK" for value in table["value"][table["part"] == part]
    ]
    refused(lambda: patched.matrix("segment", "segment"), "has the parts V, K; say which one")
    refused(lambda: patched.matrix("part", "segment", "k"), "no part in the sweep called 'k'")
    refused(lambda: patched.matrix("part", "segment", content="along"), "no content in the sweep called 'along'")
    refused(lambda: patched.matrix("part", "segment", value="effects"), "did you mean 'effect'")


def test_a_table_has_a_row_for_each_cell(tiny_llama: Model):
    base, donor = two(tiny_llama)
    patched = swept(
        base, donor, base.suffix(0, 2), over={"slot": [11, 4], "layer": [2], "head": None}, parts=("V", "K")
    )
    table = patched.df()
    assert table[["slot", "layer", "head", "part"]].values.tolist() == [
        [slot, 2, head, part] for slot in (11, 4) for head in (0, 1) for part in "VK"
    ]
    assert table["segment"].tolist() == ["T2"] * 4 + ["T1"] * 4
    assert table["token"].tolist() == [base.row.ids[slot] for slot in (11, 4) for _ in range(4)]
    texts = [tiny_llama.tokenizer.decode([base.row.ids[slot]]) for slot in (11, 4)]
    assert table["text"].tolist() == [text for text in texts for _ in range(4)]
    label = f"{json.dumps(texts[0])} at 11 (T2)"
    assert patched.matrix("slot", "head", "V").index[0] == label
    figure = kv.plots.patching(patched, "slot", "head")
    ticks = [[tick.get_text() for tick in axis.get_xticklabels()] for axis in figure.axes[:2]]
    assert ticks == [["H0", "H1"]] * 2
    assert figure.axes[0].get_yticklabels()[0].get_text() == label.replace("$", r"\$")
    assert near(table["value"].to_numpy(), patched.values)
    assert near(table["effect"].to_numpy(), patched.effect)
    assert near(table["normalised"].to_numpy(), patched.normalised)
