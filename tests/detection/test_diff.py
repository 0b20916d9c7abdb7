"""Two caches side by side: benign pairs are alike, and what was planted is found where it is, by its kind."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from functools import reduce
from html import escape
from pathlib import Path
from typing import Literal
from weakref import WeakSet

import numpy as np
import pytest
import torch
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.floors import floor_between
from kvprobe.cache.layer import Layer
from kvprobe.cache.ledger import NO_TOKEN
from kvprobe.cache.stored import LazyLayers, StoredCache
from kvprobe.detection.diff import diff
from kvprobe.editing import splice
from kvprobe.faults import (
    BitFlips,
    ChannelOrder,
    Draws,
    Fault,
    FaultContext,
    ForeignBlock,
    ForeignScales,
    Gaussian,
    Misread,
    NotANumber,
    OverlappingKV,
    PositionShift,
    QuantisationNoise,
    Scaled,
    Scope,
    StaleBlock,
    WrongPointers,
    Zeros,
)
from kvprobe.inference.model import Model, load
from kvprobe.report.views.diff import save_diff
from kvprobe.text.tokens import Tokens
from tests.models import llama
from tests.refusals import refused

RNG = np.random.default_rng(5)
IDS = RNG.integers(1, 60, 96).tolist()
LAYER, BLOCK = 1, range(32, 48)
SCOPE = Scope(layers=(LAYER,), slots=BLOCK)
KEYS = replace(SCOPE, parts="k")


@pytest.fixture(scope="module")
def tiny() -> Model:
    """A tiny Llama whose weights are large, so that what a slot sees is felt."""
    plain = llama(head_dim=32).lanes.plain
    for parameter in plain.parameters():
        if parameter.ndim == 2:
            parameter.data *= 3
    return load(plain)


@pytest.fixture(scope="module")
def right(tiny: Model) -> KVCache:
    return tiny.prefill(IDS)


@pytest.fixture(scope="module")
def chunked(tiny: Model) -> KVCache:
    return tiny.extend(tiny.prefill(IDS[:40]), [IDS[40:]])[0]


@pytest.fixture(scope="module")
def context(tiny: Model, right: KVCache) -> FaultContext:
    other = tiny.prefill(np.random.default_rng(6).integers(1, 60, 96).tolist())
    return FaultContext(right, {"distractor": other}, tiny.lanes.rotaries)


def struck(fault: Fault, cache: KVCache, context: FaultContext) -> KVCache:
    return fault.corrupt(cache, [Draws(seed=1)], [context])


FAULTS: dict[str, tuple[Fault, str]] = {
    "zeros": (Zeros(scope=SCOPE), "zeroed"),
    "NaN": (NotANumber(scope=SCOPE), "not finite"),
    "factor": (Scaled(1.5, scope=SCOPE), "scale error"),
    "scales of others": (ForeignScales(scope=SCOPE), "scale error"),
    "8 bits": (QuantisationNoise(8, scope=SCOPE), "quantisation"),
    "4 bits": (QuantisationNoise(4, scope=SCOPE), "quantisation"),
    "another text": (ForeignBlock(scope=SCOPE), "foreign prefix"),
    "what was there before": (StaleBlock(scope=SCOPE), "stale"),
    "another block": (WrongPointers("repeated", scope=SCOPE), "repeated blocks"),
    "two blocks": (WrongPointers(scope=replace(KEYS, slots=range(32, 64))), "permuted blocks"),
    "positions": (PositionShift(7, scope=KEYS), "position shift"),
    "K over V": (OverlappingKV(last="k", scope=SCOPE), "K and V swapped"),
    "layout": (Misread(scope=SCOPE), "K and V interleaved"),
    "channels": (ChannelOrder(scope=KEYS), "channel order"),
    "sign": (BitFlips(field="sign", scope=replace(KEYS, unit="number", count=1)), "bit flip"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_was_planted_is_found_in_its_layer_and_slots_by_its_kind(
    name: str, right: KVCache, chunked: KVCache, context: FaultContext
):
    fault, kind = FAULTS[name]
    found = diff(struck(fault, chunked, context), right)
    assert found.differs
    assert found.kind == kind, str(found)
    assert found.layers == (LAYER,)
    assert found.first is not None
    assert found.worst is not None
    assert {found.first.slot, found.worst.slot} <= set(fault.scope.slots or ())
    assert found.confidence > 0.3
    assert str(found.causes[0]) in str(found)


@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("scale", [0.001, 0.02])
@pytest.mark.parametrize("matched", ["raw", "mean+spread"])
def test_noise_that_is_small_beside_what_it_replaces_holds_nothing_else(
    matched: Literal["raw", "mean+spread"], scale: float, part: Literal["k", "v"], right: KVCache, context: FaultContext
):
    """Any rows that are small, or near a mean row, explain the size of such a difference, and none of its content."""
    noise = Gaussian(matched, scale, scope=replace(SCOPE, parts=part))
    found = diff(struck(noise, right, context), right)
    assert found.kind == "unknown", str(found)
    assert found.layers == (LAYER,)


def test_keys_far_larger_than_values_are_not_swapped_where_noise_replaces_them(right: KVCache, context: FaultContext):
    """V is untouched, and rows of K hold nothing of it."""
    larger = tuple({**layer, "K": 20 * layer["K"] + 5} for layer in right.layers)
    large = replace(right, layers=larger)
    found = diff(struck(Gaussian("raw", scope=KEYS), large, replace(context, cache=large)), large)
    assert found.kind == "unknown", str(found)
    swapped = diff(struck(OverlappingKV("v", scope=SCOPE), large, replace(context, cache=large)), large)
    assert swapped.kind == "K and V swapped", str(swapped)


def test_shift_factor_and_bit_are_said(right: KVCache, context: FaultContext):
    """Without the model, the rotation is recognised by the angles between the pairs of a key."""

    def numbers(fault: Fault) -> dict[str, float | int | str]:
        return dict(diff(struck(fault, right, context), right).causes[0].numbers)

    assert numbers(PositionShift(-11, scope=KEYS))["shift"] == -11
    assert numbers(Scaled(0.25, scope=SCOPE))["factor"] == pytest.approx(0.25, rel=1e-4)
    flip = numbers(BitFlips(bit=29, scope=replace(KEYS, unit="number", count=1)))
    assert (flip["bit"], flip["stored"], flip["field"]) == (29, "fp32", "exponent")
    brain = numbers(BitFlips("bf16", bit=6, scope=replace(KEYS, unit="number", count=1)))
    assert (brain["bit"], brain["stored"], brain["field"]) == (6, "bf16", "mantissa")


def test_benign_pairs_are_alike(tiny: Model, right: KVCache, chunked: KVCache):
    batch = tiny.prefill([IDS, IDS[::-1]]).rows([0])
    half = replace(
        right, layers=tuple({part: held.bfloat16() for part, held in layer.items()} for layer in right.layers)
    )
    for other in (right, chunked, batch, half):
        found = diff(other, right)
        assert not found.differs, str(found)
        assert found.kind == "numerics"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("held_in", [torch.float32, torch.bfloat16])
def test_fp8_is_no_benign_difference_whatever_it_is_held_in(
    dtype: torch.dtype, held_in: torch.dtype, right: KVCache, chunked: KVCache
):
    """All numbers of fp8 are numbers of bfloat16, too."""

    def rounded(cache: KVCache, *dtypes: torch.dtype) -> KVCache:
        parts = ({name: reduce(Tensor.to, dtypes, part) for name, part in layer.items()} for layer in cache.layers)
        return replace(cache, layers=tuple(parts))

    eight = rounded(right, dtype, held_in)
    for reference in (right, chunked, rounded(right, torch.bfloat16)):
        found = diff(eight, reference)
        assert found.kind == "quantisation", str(found)
        assert diff(reference, eight).differs
    assert not diff(eight, rounded(right, dtype)).differs


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("held_in", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (2, 3), (3,)], ids=["tensor", "head", "vector"])
def test_fp8_at_a_scale_of_its_own_is_quantisation_whatever_it_is_held_in(
    dtype: torch.dtype, held_in: torch.dtype, axes: tuple[int, ...], right: KVCache, chunked: KVCache
):
    def rounded(part: Tensor) -> Tensor:
        scale = part.abs().amax(axes, keepdim=True) / torch.finfo(dtype).max * 1.3
        limit = torch.finfo(dtype).max
        return ((part / scale).clamp(-limit, limit).to(dtype).float() * scale).to(held_in)

    eight = replace(
        right, layers=tuple({name: rounded(part) for name, part in layer.items()} for layer in right.layers)
    )
    half = replace(
        right, layers=tuple({name: part.bfloat16() for name, part in layer.items()} for layer in right.layers)
    )
    for reference in (right, chunked, half):
        found = diff(eight, reference)
        assert found.kind == "quantisation", str(found)
        assert diff(reference, eight).differs
    assert not diff(eight, eight).differs


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (2, 3), (1, 3), (3,), (2,)], ids=str)
@pytest.mark.parametrize("times", [1.0, 1.37], ids=["from the largest", "set before"])
def test_numbers_in_steps_are_quantisation_whatever_shares_a_step(
    axes: tuple[int, ...], times: float, right: KVCache, chunked: KVCache
):
    """A scale that was set before: the largest number has fewer than 127 steps."""

    def rounded(part: Tensor) -> Tensor:
        step = times * part.abs().amax(axes, keepdim=True) / 127
        return (part / step).round() * step

    layers = ({name: rounded(part) for name, part in layer.items()} for layer in right.layers)
    found = diff(replace(right, layers=tuple(layers)), chunked)
    assert found.kind == "quantisation", str(found)
    noise = torch.Generator().manual_seed(0)
    layers = (
        {name: part * (1 + 0.004 * torch.randn(part.shape, generator=noise)) for name, part in layer.items()}
        for layer in right.layers
    )
    assert diff(replace(right, layers=tuple(layers)), chunked).kind != "quantisation"


def test_a_floor_of_ones_own_says_what_is_benign(right: KVCache):
    generator = torch.Generator().manual_seed(0)
    layers = [
        {name: part * (1 + 1e-3 * torch.randn(part.shape, generator=generator)) for name, part in layer.items()}
        for layer in right.layers
    ]
    noisy = replace(right, layers=tuple(layers))
    assert diff(noisy, right).differs
    assert not diff(noisy, right, floor=floor_between("bfloat16", "float32")).differs


def test_one_rounded_layer_makes_no_cache_of_a_coarser_precision(right: KVCache):
    for rounded, scaled in ((0, 2), (2, 0)):
        layers = [{**layer} for layer in right.layers]
        layers[rounded] = {name: part.bfloat16().float() for name, part in layers[rounded].items()}
        layers[scaled] = {name: 1.02 * part for name, part in layers[scaled].items()}
        found = diff(replace(right, layers=tuple(layers)), right)
        assert set(found.layers) == {rounded, scaled}, str(found)
        assert "scale error" in {cause.kind for cause in found.causes}


def test_a_damaged_slot_leaves_the_precision_of_a_cache_as_it_is(right: KVCache):
    half = [{name: part.bfloat16().float() for name, part in layer.items()} for layer in right.layers]
    for layer in (0, len(half) - 1):
        for broken in (0.0, 0.1, torch.nan):
            struck = [{name: part.clone() for name, part in held.items()} for held in half]
            struck[layer]["V"][0, :, 40] = broken
            found = diff(replace(right, layers=tuple(struck)), right)
            assert (found.floor.name, found.layers) == ("bfloat16 and float32", (layer,)), str(found)


@pytest.mark.parametrize("longer", [1, 5])
def test_padding_makes_no_difference_at_the_end_or_between_slots(tiny: Model, right: KVCache, longer: int):
    padded = KVCache.join([right, tiny.prefill([*IDS[::-1], *IDS[:longer]])])
    ragged = tiny.extend(padded, [IDS[:2], IDS[:2]])[0].rows([0])
    for cache, reference in ((padded.rows([0]), right), (right, padded.rows([0])), (ragged, tiny)):
        found = diff(cache, reference, model=tiny)
        assert not found.differs, str(found)
        assert found.effect is not None
        assert found.effect.kl == pytest.approx(0, abs=1e-6)
    worse = diff(ragged.corrupt(Scaled(8.0, scope=Scope(segments="text", parts="v"))), tiny)
    assert worse.first is not None
    assert (worse.kind, worse.first.slot) == ("scale error", len(IDS) + longer)
    whole = tiny.extend(right, IDS[:2])[0]
    refused(lambda: diff(ragged, whole), "padding between other slots")
    assert not diff(ragged.evict(slots=ragged.ledger.padding), whole).differs


def test_the_model_is_a_reference_and_says_what_it_would_write(tiny: Model, right: KVCache, context: FaultContext):
    same = diff(right, tiny)
    assert not same.differs
    assert same.effect is not None
    assert same.effect.top
    assert same.effect.kl == pytest.approx(0, abs=1e-6)
    assert same.effect.divergence is None
    wrong = diff(struck(Scaled(8.0, scope=replace(SCOPE, parts="v")), right, context), tiny)
    assert wrong.kind == "scale error"
    assert wrong.effect is not None
    assert wrong.effect.kl is not None
    assert wrong.effect.kl > 1e-4


def test_the_output_is_that_of_the_row_that_differs(tiny: Model):
    both = tiny.prefill([IDS, IDS])
    values = [part.clone() for part in both.values]
    values[1][1] += 1.0
    found = diff(both.with_parts({"V": values}), both, model=tiny)
    assert found.worst is not None
    assert found.worst.row == 1
    assert found.effect is not None
    assert found.effect.kl is not None
    assert found.effect.kl > 1e-4


def test_the_output_is_written_after_the_last_slot_as_it_is_stored(tiny: Model, right: KVCache):
    """It is read again for the next token alone, which does not depend on what is stored of it."""
    last = len(IDS) - 1
    for number in range(1, right.n_layers):
        values = right.values[number].index_fill(2, torch.tensor([last]), 5.0)
        right = changed(right, number, V=values)
    found = diff(right, tiny)
    assert (found.first and found.first.slot, found.worst and found.worst.slot) == (last, last)
    assert found.effect is not None
    assert found.effect.kl == pytest.approx(0, abs=1e-6)
    assert found.effect.divergence in (1, 2)
    gone = changed(right, 1, V=right.values[1].index_fill(2, torch.tensor([last]), torch.nan))
    assert str(diff(gone, tiny).effect) == "Output: the model's logits are not finite."


def test_numbers_too_large_for_the_model_are_still_compared(tiny: Model, right: KVCache):
    keys = [part.clone() for part in right.keys]
    keys[1][0, 0, 5] = 3e38
    found = diff(right.with_parts({"K": keys}), right, model=tiny)
    assert found.differs
    assert str(found.effect) == "Output: the model's logits are not finite."


def test_other_tokens_end_the_comparison_where_they_begin(tiny: Model, right: KVCache):
    kinds = {
        "truncated": IDS[:80],
        "another tokenisation": [*IDS[:50], 7, 7, *IDS[51:]],
        "another text": [*IDS[:50], *IDS[:46:-1]],
    }
    for kind, ids in kinds.items():
        found = diff(tiny.prefill(ids), right)
        assert (found.kind, found.first, found.differs) == (kind, None, True)
        assert found.texts[0].slot in (80, 50)
        assert found.slots == found.texts[0].slot


def test_each_row_is_compared_as_far_as_its_own_tokens_agree(tiny: Model, context: FaultContext):
    both = tiny.prefill([IDS, IDS[::-1]])
    values = [part.clone() for part in both.values]
    values[LAYER][0, :, 50] = 0
    wrong = both.with_parts({"V": values})
    for ids in ([*IDS[:4:-1], 7, 7, 7, 7, 7], IDS[:85:-1], [*IDS[: -len(IDS) : -1], 5]):
        other = tiny.prefill([IDS, ids])
        found = diff(wrong, other)
        assert (found.kind, found.layers, len(found.texts)) == ("zeroed", (LAYER,), 1), str(found)
        assert found.texts[0].row == 1
        assert found.first is not None
        assert (found.first.row, found.first.slot) == (0, 50)
        alike = diff(both, other)
        assert (alike.first, alike.hidden, len(alike.texts)) == (None, 0, 1)


def test_one_layer_of_each_is_in_memory_at_a_time(right: KVCache, chunked: KVCache, context: FaultContext):
    wrong = struck(Zeros(scope=SCOPE), chunked, context)
    held: WeakSet[torch.Tensor] = WeakSet()
    most = 0

    def stored(cache: KVCache) -> StoredCache:
        def read(number: int) -> Layer:
            nonlocal most
            layer = {part: tensor.clone() for part, tensor in cache.layers[number].items()}
            for tensor in layer.values():
                held.add(tensor)
            most = max(most, len(held))
            return layer

        return StoredCache(LazyLayers(len(cache.layers), read), cache.ledger, "a file of a test")

    assert str(diff(stored(wrong), stored(right))) == str(diff(wrong, right))
    assert most <= 6  # of two layers of one and one of the other, K and V


def test_other_shapes_and_rows_are_refused(tiny: Model, right: KVCache):
    refused(lambda: diff(right.fork(2), right), "2 and 1 rows")
    shorter = replace(right, layers=right.layers[:1])
    refused(lambda: diff(shorter, right), "compare caches of one model")


def test_the_command_has_exit_codes_a_page_and_json(
    right: KVCache,
    context: FaultContext,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    from kvprobe.cli.entry import main

    wrong = struck(Zeros(scope=SCOPE), right, context)
    for name, cache in (("right", right), ("wrong", wrong)):
        replace(cache, made_by=None).save(tmp_path / name)

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["kvprobe", "diff", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        out = capsys.readouterr()
        return int(left.value.code or 0), out.out, out.err

    assert run(tmp_path / "right", tmp_path / "right")[:2] == (0, str(diff(right, right)) + "\n")
    page = tmp_path / "diff.html"
    code, printed, _ = run(tmp_path / "wrong", tmp_path / "right", "--json", "--out", page)
    said = json.loads(printed)
    assert (code, said["verdict"], said["kind"]) == (1, "differ", "zeroed")
    assert (said["first"]["layer"], said["first"]["slot"]) == (LAYER, BLOCK.start)
    assert escape(said["causes"][0]["evidence"], quote=False) in page.read_text()
    code, _, error = run(tmp_path / "nothing", tmp_path / "right")
    assert code == 2
    assert "nothing" in error
    assert run(tmp_path / "right")[0] == 2


def test_two_files_are_compared_without_what_models_need(right: KVCache, tmp_path: Path):
    right.save(tmp_path / "right.safetensors")
    paths = [str(tmp_path / "right.safetensors")] * 2
    check = (
        "import sys\n"
        "from kvprobe.cli import main\n"
        "try:\n"
        f"    sys.argv = ['kvprobe', 'diff', *{paths!r}]\n"
        "    main()\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "heavy = {'transformers', 'transformer_lens', 'pandas', 'kvprobe.inference.model'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Alike" in done.stdout


def test_a_page_shows_where_it_is_and_is_inert(right: KVCache, context: FaultContext, tmp_path: Path):
    hostile = "<script>alert(1)</script>"
    layers = struck(Zeros(scope=SCOPE), right, context).layers
    page = save_diff(diff(StoredCache(layers, right.ledger, hostile), right), tmp_path / "page.html").read_text()
    assert hostile not in page
    assert re.search(r"<td><b>zeroed</b></td>", page)


def test_it_says_whose_noise_floor_was_used_and_what_the_common_one_means(
    smol: Model, right: KVCache, context: FaultContext, tmp_path: Path
):
    measured = smol.prefill([1, 5, 9, 20])
    supplied = floor_between("float32", "float32")
    cases = {
        "own": (diff(measured, measured), "this model's own noise floor of float32 and float32."),
        "common": (diff(right, right), "the common noise floor"),
        "supplied": (diff(right, right, floor=supplied), "the supplied noise floor"),
    }
    for source, (found, phrase) in cases.items():
        assert (found.floor_from, found.as_mapping()["floor_from"]) == (source, source)
        page = save_diff(found, tmp_path / "page.html").read_text()
        for said in (found.verdict, str(found)):
            assert phrase in said
        assert escape(phrase, quote=False) in page.replace("&#39;", "'")
        meaning = "measured in smollm2-135m and qwen2.5-coder-0.5b, and not in this model"
        assert {meaning in str(found), meaning in page} == {source == "common"}
    wrong = diff(struck(Zeros(scope=SCOPE), right, context), right)
    assert wrong.verdict.endswith("(block 2), by the common noise floor of float32 and float32.")


def test_the_floor_of_another_model_is_refused(smol: Model, right: KVCache):
    own = floor_between("float32", "float32", model=smol.lanes.config_digest)
    refused(lambda: diff(right, right, floor=own), "measured in smollm2-135m", "leave `floor` out")
    measured = smol.prefill([1, 5, 9, 20])
    assert not diff(measured, measured, floor=own).differs
    nobody = replace(right, made_by=None)
    assert diff(nobody, nobody, floor=own).floor_from == "supplied"


def test_other_weights_are_told_from_another_text(tiny: Model, right: KVCache):
    other = llama(seed=1, head_dim=32).prefill(IDS)
    nobody = replace(right, made_by=None)
    (weights,) = diff(replace(other, made_by=None), nobody).causes
    assert (weights.kind, weights.layers, weights.slots) == ("other weights", (0, 1, 2), "0 to 95")
    assert "one V for each token" in weights.evidence
    for ids in (IDS[::-1], [*IDS[48:], *IDS[:48]], np.random.default_rng(9).integers(1, 60, 96).tolist()):
        foreign = replace(tiny.prefill(ids), ledger=right.ledger)
        assert {cause.kind for cause in diff(foreign, right).causes} <= {"foreign prefix", "stale"}


def test_a_text_in_which_each_token_is_replaced_is_told_from_other_weights(tiny: Model):
    ids = [1 + token % 29 for token in IDS]
    right = tiny.prefill(ids)
    elsewhere, inside = (
        replace(tiny.prefill(new), ledger=right.ledger)
        for new in ([token + 29 for token in ids], [1 + token % 29 for token in ids])
    )
    for cache, reference in ((elsewhere, tiny), (inside, tiny), (inside, right)):
        (cause,) = diff(cache, reference).causes
        assert (cause.kind, cause.layers) == ("foreign prefix", (0, 1, 2)), str(cause)
        assert re.search(r"that of another token for 2\d of 28 tokens, as of \d+ in place of 1\.", cause.evidence)
    (unsure,) = diff(elsewhere, right).causes
    assert unsure.kind == "other weights"
    assert "or hold a text in which each token is replaced by another, which `model` would show" in unsure.evidence
    weights = replace(llama(seed=1, head_dim=32).prefill(ids), made_by=None)
    (sure,) = diff(weights, replace(right, made_by=None), model=tiny).causes
    assert sure.kind == "other weights"
    assert "which no token of this model has" in sure.evidence


def test_slots_that_saw_what_was_evicted_are_not_said_to_be_of_another_text(tiny: Model, right: KVCache):
    evicted = right.evict(slots=[*range(5, 20)])
    for cache in (evicted, tiny.as_seen(evicted.reindex())):
        (cause,) = diff(cache, tiny).causes
        assert (cause.kind, cause.layers, cause.slots) == ("foreign prefix", (1, 2), "5 to 80")
        assert "hold their own tokens" in cause.evidence


def test_hidden_slots_are_counted_as_not_compared(tiny: Model, right: KVCache):
    keys = [part.clone() for part in right.keys]
    keys[1][:, :, 7] = 0
    found = diff(right.with_parts({"K": keys}).mask(slots=[7, 9]), tiny)
    assert (found.differs, found.hidden, found.as_mapping()["hidden"]) == (False, 2, 2)
    assert "2 slots are hidden in some layer and head, and were not compared there" in str(found)
    assert diff(right, tiny).hidden == 0
    assert diff(right.mask(slots=[3], layers=[0]), right).hidden == 1


def test_slots_of_another_origin_are_named_by_the_ledger_and_not_guessed(tiny: Model):
    other = llama(seed=1, head_dim=32)
    before, piece, rest = Tokens.of(IDS[:32], "a"), Tokens.of(IDS[32:48], "b", 32), Tokens.of(IDS[48:], "c", 48)
    own, theirs = tiny.prefill(before + piece + rest), other.prefill(before + piece).select("b")
    known = diff(splice(own.evict("b"), theirs, at=32, other_maker=True), own)
    assert [(cause.kind, cause.slots, cause.confidence) for cause in known.causes] == [("another model", "32 to 47", 1)]
    assert f"({other.fingerprint[:8]}), and those of the second" in known.causes[0].evidence
    read = tiny.extend(splice(tiny.prefill(before), theirs, at=32, other_maker=True), [rest])[0]
    assert {cause.kind for cause in diff(read, own).causes} == {"another model", "after other slots"}
    struck = own.corrupt(Scaled(1.5, scope=SCOPE))
    span = torch.zeros(1, len(IDS), dtype=torch.bool).index_fill(1, torch.tensor(BLOCK), True)
    fitted = replace(struck, ledger=replace(own.ledger, tokens=own.ledger.tokens.masked_fill(span, NO_TOKEN)))
    (cause,) = diff(fitted, own).causes
    assert (cause.kind, cause.slots) == ("fitted slots", "32 to 47")
    assert "in the first cache alone" in cause.evidence
    assert diff(struck, own).kind == "scale error"


def test_slots_hidden_or_moved_in_one_cache_alone_are_differences(tiny: Model, right: KVCache):
    hidden = diff(right.mask(slots=[3, 4]), right)
    assert hidden.differs
    assert hidden.kind == "hidden slots"
    gapped = right.evict(slots=[3, 4])
    assert diff(gapped.reindex(), gapped).kind == "other positions"
    assert not diff(right.mask(slots=[3, 4]), tiny).differs


def test_what_goes_on_at_another_position_is_a_difference(tiny: Model, right: KVCache):
    later, fresh = right.evict(slots=[*range(80, 96)]), tiny.prefill(IDS[:80])
    found = diff(later, fresh)
    assert (found.differs, found.kind, found.first) == (True, "other positions", None)
    assert "The next token stands at position 96 after the first cache, at 80 after the second" in str(found)
    assert not diff(later.reindex(), fresh).differs
    assert not diff(later, tiny).differs
    assert diff(fresh, right).kind == "truncated"
    rows = diff(KVCache.join([right, later]), KVCache.join([right, fresh]))
    assert "The next token of row 1 stands" in str(rows)


def changed(cache: KVCache, layer: int, **parts: torch.Tensor) -> KVCache:
    return replace(cache, layers=tuple({**of, **parts} if at == layer else of for at, of in enumerate(cache.layers)))


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_numbers_of_the_reference_that_are_not_finite_are_named(right: KVCache, number: float):
    keys = right.layers[LAYER]["K"].clone()
    keys[:, :, 40] = number
    found = diff(right, changed(right, LAYER, K=keys))
    assert found.kind == "not finite"
    assert "in the reference" in found.causes[0].evidence
    json.dumps(found.as_mapping(), allow_nan=False)


@pytest.mark.parametrize("number", [1e38, 3e38])
def test_numbers_whose_squares_overflow_are_explained_by_no_nan(right: KVCache, number: float):
    keys = right.layers[LAYER]["K"].clone()
    keys[:, :, 40] = number
    found = diff(changed(right, LAYER, K=keys), right)
    assert found.kind == "unknown"
    assert "nan" not in str(found)
    json.dumps(found.as_mapping(), allow_nan=False)


def test_layers_between_the_first_and_the_last_are_to_be_alike_too(right: KVCache):
    """One that the reference lacks would otherwise be compared with nothing, and its damage not seen."""
    other = {"fewer heads": right.layers[LAYER]["K"][:, :1], "fewer numbers": right.layers[LAYER]["K"][..., :8]}
    for part in other.values():
        smaller = changed(right, LAYER, K=part, V=part)
        for pair in ((smaller, right), (right, smaller)):
            refused(lambda pair=pair: diff(*pair), "Layer 1 of the first cache")
    layers = tuple({} if at == LAYER else of for at, of in enumerate(right.layers))
    lacking = StoredCache(layers, right.ledger, "a dump")
    refused(lambda: diff(right, lacking), "that of the second nothing")
    refused(lambda: diff(lacking, right), "holds nothing")


def test_caches_of_which_nothing_can_be_compared_are_not_called_alike(tiny: Model, right: KVCache):
    hidden = right.mask(slots=range(right.slots))
    struck = changed(hidden, LAYER, K=torch.zeros_like(hidden.layers[LAYER]["K"]))
    refused(lambda: diff(struck, hidden), "No slot is live in both")
    refused(lambda: diff(struck, tiny), "No slot is live in both")
    empty = right.rewind(slots=0)
    refused(lambda: diff(empty, empty), "No slot is live in both")


def test_a_slot_alone_is_explained_without_a_warning(right: KVCache, recwarn: pytest.WarningsRecorder):
    one = right.rewind(slots=1)
    found = diff(changed(one, LAYER, K=torch.full_like(one.layers[LAYER]["K"], 9.0)), one)
    assert found.differs
    assert not recwarn.list


def test_a_block_may_be_longer_than_any_cache(right: KVCache):
    assert not diff(right, right, block=10**30).differs


@pytest.mark.parametrize("position", [2**31, 2**62, 2**63 - 1])
def test_positions_that_no_model_reads_are_refused(tiny: Model, right: KVCache, position: int):
    origins = right.ledger.origins.clone()
    origins[0, -1] = position
    far = replace(right, ledger=replace(right.ledger, positions=origins, origins=origins))
    refused(lambda: diff(far, tiny), f"the position {position}")
