"""The audit: clean caches pass, and what the model would not have written is found where it is."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np
import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.cache.layer import Layer
from kvprobe.cache.parts import WRITES
from kvprobe.cache.precision import Fp8Format, fp8_parts, in_fp8
from kvprobe.cache.rotary import Rotary, Rotation
from kvprobe.cache.stored import LazyLayers, StoredCache
from kvprobe.detection import clean as learning
from kvprobe.detection.audit import audit
from kvprobe.detection.bits import in_q8
from kvprobe.detection.clean import FORMAT, Clean, CleanRecipe, clean_of, learn_clean, limits_of, load_clean, save_clean
from kvprobe.detection.clean_texts import PIECES, as_by_another_engine, clean_texts
from kvprobe.detection.columns import lone_columns, read_at_spots
from kvprobe.detection.scores import BLOCK, Score, shifted_distances
from kvprobe.faults import BitFlips, Draws, Fp8Scale, NotANumber, PositionShift, Scope, Zeros
from kvprobe.fingerprint import digest
from kvprobe.inference.model import Model, load
from kvprobe.report.views.audit import save_audit
from kvprobe.tasks import facts, sessions
from tests.models import every, gemma3, llama
from tests.refusals import refused

RECIPE = CleanRecipe(fitted=16, tailed=16, calibrated=32, longest=48, rate=0.04)
IDS = np.random.default_rng(5).integers(1, 60, 40).tolist()


@pytest.fixture(scope="module")
def tiny() -> Model:
    """A tiny Llama whose weights are large, so that what a slot sees is felt."""
    plain = llama().lanes.plain
    for parameter in plain.parameters():
        if parameter.ndim == 2:
            parameter.data *= 3
    return load(plain)


@pytest.fixture(scope="module")
def clean(tiny: Model) -> Clean:
    return learn_clean(tiny, RECIPE)


@pytest.fixture(scope="module")
def cache(tiny: Model) -> KVCache:
    return tiny.prefill(IDS)


@pytest.mark.parametrize("build", [llama, gemma3], ids=["full", "windows"])
def test_slots_computed_anew_and_tokens_alone_equal_what_the_cache_holds(build: Callable[[], Model]):
    """Of rows that are not alike, and in layers with a window."""
    model = build()
    cache = model.prefill([IDS, IDS[5:30]])
    spots = [(0, 0), (0, 7), (1, 3), (0, 30), (0, 39), (1, 24)]
    numbers: list[int] = []

    def same(number: int, anew: Sequence[torch.Tensor]) -> Layer:
        numbers.append(number)
        for part, right in zip(cache.layers[number].values(), anew, strict=True):
            stored = torch.stack([part[row][:, slot] for row, slot in spots], 1)
            assert torch.allclose(stored, right, atol=1e-5)
        return cache.layers[number]

    read_at_spots(model.lanes, cache.ledger, spots, same)
    assert numbers == list(range(cache.n_layers))
    positions = cache.ledger.origins[0]
    lone = lone_columns(model.lanes, cache.ledger.tokens[0], positions, 1)[0]
    for part, right in zip(cache.layers[0].values(), lone, strict=True):
        assert torch.allclose(part[0], right, atol=1e-5)


def test_each_layer_of_a_file_is_read_once_and_both_ends_to_know_it(tiny: Model, clean: Clean, cache: KVCache):
    """By its shape, and by whether it is in fp8."""
    reads: list[int] = []

    infinite = cache.corrupt(NotANumber(scope=Scope(layers=(0,), slots=range(3), parts="k")))
    for held in (cache, infinite):

        def read(number: int, held: KVCache = held) -> Layer:
            reads.append(number)
            return held.layers[number]

        stored = StoredCache(LazyLayers(cache.n_layers, read), cache.ledger, "a file")
        reads.clear()
        found = audit(tiny, stored, clean)
        assert found.as_mapping() == audit(tiny, held, clean).as_mapping() | {"cache": "a file"}
        assert sorted(reads) == sorted([0, 0, cache.n_layers - 1, *range(cache.n_layers)])


def test_clean_caches_pass_also_by_another_engine(tiny: Model, clean: Clean):
    texts = clean_texts(tiny, 12, 48, np.random.default_rng(99))
    alarms = sum(audit(tiny, as_by_another_engine(tiny, [text]), clean).suspicious for text in texts)
    alarms += sum(audit(tiny, tiny.prefill(text), clean).suspicious for text in texts)
    assert alarms <= 2  # of 24, though the limits come from few texts


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_a_cache_in_fp8_is_held_against_clean_ones_in_the_same_fp8(
    kind: Fp8Format, tiny: Model, clean: Clean, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KVPROBE_CACHE", str(tmp_path))
    stored = {"K": kind, "V": kind}
    coarse = learn_clean(tiny, replace(RECIPE, fp8=stored))
    monkeypatch.setattr(learning, "learn_clean", lambda model, recipe: coarse if recipe.fp8 == stored else clean)
    texts = clean_texts(tiny, 24, 48, np.random.default_rng(98))
    sound = [tiny.prefill(text).corrupt(Fp8Scale(1.0, kind)) for text in texts]
    finer = replace(clean, recipe=replace(RECIPE, fp8=stored))
    assert sum(audit(tiny, cache, finer).suspicious for cache in sound) > 12
    found = [audit(tiny, cache) for cache in sound]
    assert sum(one.suspicious for one in found) <= 2  # of 24, though the limits come from few texts
    assert any(f"clean caches with K in fp8 ({kind}) and V in fp8 ({kind})" in sentence for sentence in found[0].unseen)
    assert not any("in fp8" in sentence for sentence in audit(tiny, tiny.prefill(texts[0])).unseen)
    last = tiny.geometry.n_layers - 1
    for layers in ((0,), (last,)):  # rounded by mistake, so the others are held to what they should be
        part = tiny.prefill(texts[0]).corrupt(Fp8Scale(1.0, kind, scope=Scope(layers=layers)))
        assert not any("in fp8" in sentence for sentence in audit(tiny, part).unseen)
    emptied = Zeros(scope=Scope(layers=(1,), slots=range(4, 8)))
    wrong = [cache.corrupt(emptied) for cache in sound]
    assert all(audit(tiny, cache).suspicious for cache in wrong)


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("mixed", [False, True])
def test_which_fp8_a_part_is_in_is_known_by_its_mantissas(scale: float, mixed: bool):
    """At whatever scale; numbers of 4 bits have as few, and no more than eight sizes."""
    kinds: dict[Fp8Format, torch.dtype] = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    model = llama(head_dim=32)
    parts = model.geometry.parts
    cache = model.prefill(IDS)

    def stored(**dtypes: torch.dtype) -> KVCache:
        return cache.with_parts({
            name: [20 * layer[name] for layer in cache.layers]
            if name not in dtypes
            else [(20 * layer[name] / scale).to(dtypes[name]).float() * scale for layer in cache.layers]
            for name in ("K", "V")
        })  # fmt: skip

    assert fp8_parts(stored(), parts) == {}
    for kind, dtype in kinds.items():
        other = next(one for one in kinds if one != kind)
        dtypes = {"K": dtype, "V": kinds[other]} if mixed else {"K": dtype}
        rounded = stored(**dtypes)
        assert in_fp8(rounded)
        assert fp8_parts(rounded, parts) == ({"K": kind, "V": other} if mixed else {"K": kind})
    most = {name: [layer[name].abs().amax(-1, keepdim=True) / 7 for layer in cache.layers] for name in ("K", "V")}
    int4 = cache.with_parts({
        name: [(layer[name] / step).round() * step for layer, step in zip(cache.layers, steps, strict=True)]
        for name, steps in most.items()
    })  # fmt: skip
    assert "e5m2" not in fp8_parts(int4, parts).values()


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "granitemoehybrid"])
@pytest.mark.parametrize("attended", [False, True], ids=["all parts", "what is attended to alone"])
def test_clean_caches_in_fp8_are_learnt_of_latents_and_of_states(kind: str, attended: bool):
    """Of hybrid models engines round K and V, and leave the states alone."""
    model = load(every.tiny(kind))
    parts = model.geometry.parts
    names = sorted({name for names in parts for name in names if name not in (WRITES if attended else ("decay",))})
    recipe = replace(RECIPE, fp8=dict.fromkeys(names, "e4m3"))
    cache = model.prefill(IDS)
    assert fp8_parts(cache, parts) == {}
    rounded = learning._in_fp8(cache, recipe)
    assert in_fp8(rounded)
    assert fp8_parts(rounded, parts) == recipe.fp8
    known = learn_clean(model, recipe)
    for number, held in enumerate(parts):
        assert {*known.parts[number]} == {*held}
    assert f"clean caches with {names[0]} in fp8 (e4m3) and {names[1]}" in str(audit(model, rounded, known))


def test_clean_caches_of_another_kind_are_refused(tiny: Model, clean: Clean, cache: KVCache):
    coarse = replace(clean, recipe=replace(RECIPE, fp8={"K": "e4m3", "V": "e4m3"}))
    refused(lambda: audit(tiny, cache, coarse), "have K in fp8 (e4m3) and V in fp8 (e4m3)", "has no part in fp8")
    rounded = cache.corrupt(Fp8Scale(1.0, "e5m2"))
    for given in (clean, coarse):
        refused(lambda given=given: audit(tiny, rounded, given), "this one has K in fp8 (e5m2) and V in fp8 (e5m2)")
    other = llama()
    refused(lambda: audit(other, other.prefill(IDS), clean), "learnt of another model than", "(other weights")
    assert "supplied clean caches" in audit(tiny, cache, clean).verdict
    assert audit(tiny, cache, clean).as_mapping()["clean_from"] == "supplied"


def test_what_is_learnt_is_the_same_in_all_versions_with_this_format():
    """It is learnt from these texts alone; with another text FORMAT is another one, too."""
    chats = [facts.conversation(fact, value) for fact in facts.facts() for value in fact.values]
    chats += [sessions.conversation(session) for session in sessions.sessions()]
    said = [[(message.role, message.text) for message in chat.messages] for chat in chats]
    texts = json.dumps([said, PIECES.read_text("utf-8")])
    assert (FORMAT, digest([texts.encode()])) == ("kvprobe-clean-8", "1d92ae0aa3c0be1b")


def test_the_few_places_of_one_head_do_not_make_its_tail_far_narrower_than_those_of_others(clean: Clean):
    """By those alone one was four times as wide as another, and limits were measured in the narrowest."""
    wide = torch.cat([tail[:, 1] for key, tail in clean.tails.items() if key.startswith("computed anew.")])
    assert len(wide) > 4
    assert wide.max() < 1.5 * wide.min()


def test_limits_hold_at_their_rate_also_where_the_tails_of_checks_differ():
    rng, rate, alarms = np.random.default_rng(3), 0.05, 0

    def caches(count: int) -> list[dict[str, float]]:
        drawn = zip(
            2 * rng.exponential(size=count), rng.pareto(1.5, count) + 4, 3 + rng.normal(size=count), strict=True
        )
        return [{"norm": light, "computed anew": heavy, "number": short} for light, heavy, short in drawn]

    for _ in range(100):
        limits = limits_of(caches(20), caches(40), rate)
        alarms += sum(any(value > limits[check] for check, value in cache.items()) for cache in caches(40))
    assert 0.01 < alarms / 4000 <= rate


def test_slots_that_left_the_window_of_a_layer_are_judged_in_none(tiny: Model, clean: Clean, cache: KVCache):
    gone = cache.mask(slots=range(5, 9), layers=[1])
    emptied = Zeros(scope=Scope(layers=(1,), slots=range(5, 9)))
    assert audit(tiny, cache.corrupt(emptied), clean).suspicious
    found = audit(tiny, gone.corrupt(emptied), clean)
    assert not found.suspicious
    assert "4 slots that some layer does not hold, or hides, are judged in none." in found.unseen


def test_what_is_not_a_number_is_as_unusual_as_can_be(clean: Clean):
    key = next(key for key in clean.tails if key.startswith("computed anew.1."))
    check, layer, part = key.split(".")
    score = Score(check, int(layer), part, torch.full((len(clean.tails[key]), 1), math.nan), torch.tensor([0]))
    assert clean.excess(score).isposinf().all()


@pytest.mark.parametrize(
    "rotary",
    [
        Rotary(torch.tensor([1.0, 0.3, 0.01]), layout, last)
        for layout in ("half", "interleaved")
        for last in (False, True)
    ],
    ids=["half", "half, last", "interleaved", "interleaved, last"],
)
def test_distances_at_shifted_positions_are_those_of_keys_rotated_one_shift_at_a_time(rotary: Rotary):
    generator = torch.Generator().manual_seed(0)
    keys, expected = torch.randn(2, 2, 5, BLOCK, 8, generator=generator)
    rest, shifts = torch.randn(2, 8, 8, generator=generator), [0, 1, -3, 700]
    found = shifted_distances(keys, expected, rest, rotary, shifts)
    for number, shift in enumerate(shifts):
        back = Rotation.between(rotary, torch.tensor([[shift]]), torch.tensor([[0]]))
        apart = (back.of(keys) - expected) @ rest[:, None]
        assert torch.allclose(found[..., number], apart.square().mean((-1, -2)), rtol=1e-5)


def test_a_cache_longer_than_what_was_learnt_says_so(tiny: Model, clean: Clean):
    assert any("at most 48 tokens" in sentence for sentence in audit(tiny, tiny.prefill(IDS * 2), clean).unseen)


@pytest.mark.parametrize(
    ("fault", "check", "layer"),
    [
        (Zeros(scope=Scope(count=1, layers=(1,), unit="slot")), "zeros", 1),
        (NotANumber(scope=Scope(count=1, layers=(1,), unit="slot")), "finite", 1),
        (BitFlips("bf16", field="exponent", scope=Scope(count=1, layers=(0,), unit="number")), "token", 0),
        (PositionShift(3, scope=Scope(rate=1.0, layers=(0,))), "position", 0),
    ],
    ids=["zeros", "not finite", "bit flip", "positions"],
)
def test_what_the_model_would_not_have_written_is_found_in_its_layer(
    fault: Zeros, check: str, layer: int, tiny: Model, clean: Clean, cache: KVCache
):
    from kvprobe.faults import FaultContext

    context = FaultContext(cache, rotaries=tiny.lanes.rotaries)
    found = audit(tiny, fault.corrupt(cache, [Draws(seed=3)], [context]), clean)
    named = {finding.check: finding for finding in found.findings}
    assert check in named
    assert min(layer for finding in found.findings for layer in finding.layers) == layer
    if check == "position":
        assert named[check].shift == 3
    assert str(named[check]) in str(found)


def test_columns_see_another_text_behind_the_same_tokens(tiny: Model, clean: Clean, cache: KVCache):
    """Slots of the same tokens that saw another text are those of a clean cache; what follows them is not."""
    other = tiny.prefill([*([61, 62] * 8), *IDS[16:]])

    def taken(part: torch.Tensor, foreign: torch.Tensor) -> torch.Tensor:
        return torch.cat([part[:, :, :16], foreign[:, :, 16:32], part[:, :, 32:]], 2)

    layers = tuple(
        {name: taken(part, theirs[name]) for name, part in ours.items()}
        for ours, theirs in zip(cache.layers, other.layers, strict=True)
    )
    found = audit(tiny, replace(cache, layers=layers), clean)
    assert "computed anew" in {finding.check for finding in found.findings}


def test_the_page_and_the_json_hold_what_was_found(tiny: Model, clean: Clean, cache: KVCache, tmp_path: Path):
    damaged = Zeros(scope=Scope(slots=[9], layers=(1,))).corrupt(cache)
    found = audit(tiny, damaged, clean)
    page = save_audit(found, tmp_path / "page.html").read_text()
    held = json.loads(json.dumps(found.as_mapping()))
    assert held["verdict"] == "suspicious"
    assert len(held["findings"]) == len(found.findings)
    assert all(escape(str(finding)) in page for finding in found.findings)


def test_of_an_edited_cache_it_says_what_it_cannot_see(tiny: Model, clean: Clean, cache: KVCache):
    edited = audit(tiny, cache.evict(slots=[10, 11]), clean)
    assert not edited.suspicious
    assert any("first 10 of 38 slots" in sentence for sentence in edited.unseen)
    assert not any("edited" in sentence for sentence in audit(tiny, cache, clean).unseen)


def test_padding_is_no_edit_and_slots_that_are_not_judged_are_counted(tiny: Model, clean: Clean, cache: KVCache):
    padded = audit(tiny, KVCache.join([cache, tiny.prefill(IDS[:20])]), clean)
    assert not any("edited" in sentence for sentence in padded.unseen)
    rows = audit(tiny, KVCache.join([cache, tiny.prefill(IDS[:20]).evict(slots=[10])]), clean)
    assert any("first 10 of 19 slots of row 1" in sentence for sentence in rows.unseen)
    hidden = audit(tiny, cache.mask(slots=range(38)), clean)
    assert any(sentence.startswith("38 slots that some layer") for sentence in hidden.unseen)
    foreign = llama(seed=1).prefill(IDS)
    layers = [*zip(foreign.layers, cache.layers, strict=True)]
    parts = {
        name: [torch.cat([theirs[name][:, :, :4], own[name][:, :, 4:]], 2) for theirs, own in layers]
        for name in ("K", "V")
    }
    headless = cache.with_parts(parts)
    assert audit(tiny, headless, clean).suspicious
    early = audit(tiny, headless.evict(slots=[0]), clean)
    assert any(sentence.startswith("3 of the first slots are not computed anew") for sentence in early.unseen)
    refused(lambda: audit(tiny, headless.rewind(slots=4).evict(slots=[0]), clean), "first 4 positions", "longer cache")


def test_what_was_learnt_is_kept_and_an_altered_file_is_refused(
    tiny: Model, clean: Clean, cache: KVCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KVPROBE_CACHE", str(tmp_path))
    monkeypatch.setattr(learning, "learn_clean", lambda model, recipe: clean)
    first = clean_of(tiny, RECIPE)
    monkeypatch.setattr(learning, "learn_clean", None)
    again = clean_of(tiny, RECIPE)
    assert first is clean
    assert torch.equal(audit(tiny, cache, again).excess, audit(tiny, cache, clean).excess)
    path = tmp_path / "kept.safetensors"
    save_clean(clean, path)
    path.write_bytes(path.read_bytes()[:1000])
    refused(lambda: load_clean(path), "delete it, and it is learnt anew")
    refused(lambda: CleanRecipe(calibrated=50), "calibrate on at least 99")


def test_a_cache_of_another_shape_or_vocabulary_is_refused(tiny: Model, clean: Clean, cache: KVCache):
    refused(lambda: audit(tiny, replace(cache, layers=cache.layers[:1]), clean), "audit a cache with the model")
    ledger = replace(cache.ledger, tokens=cache.ledger.tokens + 10**6)
    refused(lambda: audit(tiny, replace(cache, ledger=ledger), clean), "names token")


def test_rounding_to_8_bits_is_at_most_a_half_step():
    numbers = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    steps = numbers.unflatten(1, (2, 32)).abs().amax(-1).repeat_interleave(32, 1) / 127
    assert bool(((in_q8(numbers) - numbers).abs() <= steps * 0.501).all())


def test_a_cache_of_which_nothing_is_judged_is_not_called_clean(tiny: Model, clean: Clean, cache: KVCache):
    hidden = cache.corrupt(NotANumber(scope=Scope(layers=(1,), slots=range(8, 16)))).mask(slots=range(cache.slots))
    refused(lambda: audit(tiny, hidden, clean), "nothing can be judged")
