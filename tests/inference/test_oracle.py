"""Any history of reads and edits equals one pass without a cache, under masks and rotations made by hand."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvprobe.cache.ledger import PADDING
from kvprobe.inference.capture import capture
from kvprobe.inference.forward import extend
from kvprobe.inference.model import Model
from kvprobe.inference.under_policy import apply, watch
from kvprobe.models.unproved import Lane
from kvprobe.policies import H2O, TOVA, Policy, RandomEviction, Scene, SinkWindow, SlidingWindow, SnapKV
from kvprobe.text.tokens import Tokens
from tests.models import _GQA, VOCABULARY, _model, gemma3, llama
from tests.oracle import Row, whole_pass
from tests.random_caches import relative_difference

LANES = ["plain", "hooked"]
READ = ("read", "read", "read")
EDITS = ("mask", "mask ragged", "evict", "reindex", "reindex naively", "window", "sinks", "random")
SCORED = ("H2O", "TOVA", "SnapKV")
MOST_READ = 6
seeds = st.integers(0, 2**31)
Op = tuple[str, int]


@st.composite
def histories(draw: st.DrawFn, scored: bool = False) -> list[Op]:
    """Kinds of operations with a seed for each, reads first and last."""
    kinds = READ + EDITS + (SCORED * 2 if scored else ())
    middle = draw(st.lists(st.tuples(st.sampled_from(kinds), seeds), min_size=3, max_size=8))
    return [("read", draw(seeds)), *middle, ("read", draw(seeds))]


@dataclass
class Play:
    """A history as it goes on: kvprobe's scene, and the rows kept by hand.

    Attributes:
        logits: what kvprobe said: row, last token of the run + 1, logits of its last tokens.
        resid_post: the same of a layer's residual stream, and the layer.
    """

    model: Model
    lane: Lane
    batch: int
    watched: bool = False
    scene: Scene | None = None
    logits: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    resid_post: list[tuple[int, int, int, torch.Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shape = self.model.geometry
        self.rows = [Row(shape.n_layers, shape.n_kv_heads) for _ in range(self.batch)]
        # TransformerLens computes something else than Cohere does, so nothing can be captured there but K and V.
        self.hooks = type(self.model.lanes.plain).__name__ != "CohereForCausalLM"
        # Each token of a row has its own id.
        self.unread = [random.Random(row).sample(range(VOCABULARY), VOCABULARY) for row in range(self.batch)]

    def do(self, kind: str, seed: int) -> None:
        rng = random.Random(seed)
        if kind == "read":
            self.read(rng)
        elif kind in ("mask", "mask ragged", "evict"):
            self.hide(kind, rng)
        elif kind.startswith("reindex"):
            self.reindex("naively" in kind)
        else:
            self.act(self.policy(kind, rng))
        self.check()

    def read(self, rng: random.Random) -> None:
        counts = [min(rng.randint(1, MOST_READ), len(unread)) for unread in self.unread]
        if not all(counts):
            return
        gap, width = rng.choice([0, 0, 1, 3]), max(counts)
        tokens = []
        for row, count in enumerate(counts):
            ids = [self.unread[row].pop() for _ in range(count)]
            tokens.append(Tokens.of(ids, "all", self.rows[row].following + gap))
            self.rows[row].read(ids, gap, width)
        self.pass_over(tokens, min(counts), rng.random() < 0.5)

    def pass_over(self, tokens: list[Tokens], kept: int, capturing: bool) -> None:
        lanes, past = self.model.lanes, self.scene and self.scene.cache
        if self.watched:
            self.scene, logits = watch(lanes, self.scene, tokens, 4, kept)
        elif capturing and self.hooks:
            captured = capture(lanes, tokens, ["resid_post"], past=past, lane=self.lane, keep_cache=True, logits=kept)
            assert captured.cache is not None
            self.scene, logits = Scene(captured.cache), captured.logits
            for row, run in enumerate(tokens):
                for layer in range(self.model.geometry.n_layers - 1):
                    resid = captured["resid_post", layer][row, : len(run)]
                    self.resid_post.append((row, layer, len(self.rows[row].ids), resid))
        else:
            cache, logits = extend(lanes, past, tokens, self.lane, kept)
            self.scene = Scene(cache)
        self.logits += [(row, len(tokens_of_row.ids), logits[row]) for row, tokens_of_row in enumerate(self.rows)]

    def hide(self, kind: str, rng: random.Random) -> None:
        assert self.scene is not None
        cache = self.scene.cache
        if kind == "mask ragged":
            for layer in range(cache.n_layers):
                for head in range(cache.n_kv_heads):
                    gone, slots = self.draw_held(rng)
                    cache = cache.mask(slots=slots, layers=[layer], heads=[head])
                    for row, tokens in zip(self.rows, gone, strict=True):
                        row.alive[layer, head, tokens] = False
            self.scene = self.scene.with_cache(cache)
            return
        gone, slots = self.draw_held(rng)
        for row, tokens in zip(self.rows, gone, strict=True):
            if kind == "mask":
                row.alive[:, :, tokens] = False
            else:
                row.evict(tokens)
        if kind == "mask":
            self.scene = self.scene.with_cache(cache.mask(slots=slots))
        elif self.watched:
            self.scene = self.scene.take(*cache.ledger.order(~slots))
        else:
            self.scene = Scene(cache.evict(slots=slots))
        self.pad()

    def draw_held(self, rng: random.Random) -> tuple[list[list[int]], torch.Tensor]:
        """Some tokens that are held, row by row, and their slots."""
        gone = [[token for token in row.held if token is not None and rng.random() < 0.3] for row in self.rows]
        slots = [[token in tokens for token in row.held] for row, tokens in zip(self.rows, gone, strict=True)]
        return gone, torch.tensor(slots, dtype=torch.bool).reshape(self.batch, -1)

    def pad(self) -> None:
        width = max(len(row.held) for row in self.rows)
        for row in self.rows:
            row.held += [None] * (width - len(row.held))

    def reindex(self, naively: bool) -> None:
        assert self.scene is not None
        if naively or self.turns:
            self.scene = self.scene.with_cache(self.scene.cache.reindex("naive" if naively else "contiguous"))
            for row in self.rows:
                row.renumber(naively)

    @property
    def turns(self) -> bool:
        return self.model.geometry.max_position is None

    def policy(self, kind: str, rng: random.Random) -> Policy:
        mode = rng.choice(["gapped", "contiguous"]) if self.turns else "gapped"
        count = rng.randint(2, 6)
        made: dict[str, Callable[[], Policy]] = {
            "window": lambda: SlidingWindow(count, mode=mode),
            "sinks": lambda: SinkWindow(rng.randint(0, 2), count, mode=mode),
            "random": lambda: RandomEviction(
                count, rng.randint(0, 9), per_head=rng.random() < 0.5, mode=mode, every=None
            ),
            "H2O": lambda: H2O(count, mode=mode),
            "TOVA": lambda: TOVA(count, mode=mode),
            "SnapKV": lambda: SnapKV(max(4, count), window=rng.randint(1, 4), kernel=rng.choice([1, 3]), mode=mode),
        }
        return made[kind]()

    def act(self, policy: Policy) -> None:
        """Let the policy act. Who stays is its business (see `tests/policies`); what follows from that is not."""
        assert self.scene is not None
        self.scene = apply(self.model.lanes, policy, self.scene, lane=self.lane)
        ledger, live = self.scene.cache.ledger, self.scene.live
        for index, row in enumerate(self.rows):
            kept = torch.zeros_like(row.alive)
            held: list[int | None] = []
            for slot, token in enumerate(ledger.tokens[index].tolist()):
                held.append(row.ids.index(token) if ledger.segments[index, slot] != PADDING else None)
                if held[-1] is not None:
                    kept[:, :, held[-1]] = live[:, index, :, slot]
            assert not bool((kept & ~row.alive).any())
            row.alive, row.held = kept, held
            if policy.mode == "contiguous":
                row.renumber(naively=False)

    def check(self) -> None:
        """The ledger tells of every slot what was kept by hand."""
        assert self.scene is not None
        ledger, live = self.scene.cache.ledger, self.scene.live
        assert ledger.following.tolist() == [row.following for row in self.rows]
        for index, row in enumerate(self.rows):
            assert len(row.held) == ledger.slots
            for slot, token in enumerate(row.held):
                if token is None:
                    assert ledger.segments[index, slot] == PADDING
                    assert not bool(live[:, index, :, slot].any())
                    continue
                assert ledger.tokens[index, slot] == row.ids[token]
                assert torch.equal(live[:, index, :, slot], row.alive[:, :, token])
                if bool(row.alive[:, :, token].any()):
                    assert ledger.positions[index, slot] == row.positions[token]

    def compare(self, tolerance: float = 1e-4) -> None:
        """All that kvprobe computed is what the oracle computes."""
        assert self.scene is not None
        expected = [whole_pass(self.model, row) for row in self.rows]
        pairs = [(logits, expected[row].logits[end - len(logits) : end]) for row, end, logits in self.logits]
        pairs += [
            (resid, expected[row].resid_post[layer][end - len(resid) : end])
            for row, layer, end, resid in self.resid_post
        ]
        for index, row in enumerate(self.rows):
            slots = [slot for slot, token in enumerate(row.held) if token is not None]
            tokens = [token for token in row.held if token is not None]
            if not tokens:
                continue
            for layer in range(self.model.geometry.n_layers):
                cache = self.scene.cache
                pairs.append((cache.keys[layer][index][:, slots], expected[index].keys[layer][:, tokens]))
                pairs.append((cache.values[layer][index][:, slots], expected[index].values[layer][:, tokens]))
        for actual, wanted in pairs:
            assert relative_difference(actual, wanted) < tolerance


def play(model: Model, lane: Lane, history: list[Op], batch: int = 1, watched: bool = False) -> Play:
    played = Play(model, lane, batch, watched)
    for kind, seed in history:
        played.do(kind, seed)
    played.compare()
    return played


EVERYTHING: list[Op] = [(kind, seed) for seed, kind in enumerate(["read", "read", *EDITS, "read", "random", "read"])]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.filterwarnings("error:The new tokens start")
@given(history=histories())
@example(history=EVERYTHING)
@settings(max_examples=10)
def test_any_history_equals_one_pass_without_a_cache(tiny: Model, lane: Lane, history: list[Op]):
    play(tiny, lane, history)


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.filterwarnings("error:The new tokens start")
@given(history=histories(), batch=st.integers(2, 3))
@settings(max_examples=6)
def test_any_history_of_a_batch_with_different_slots_equals_one_pass_per_row(
    tiny: Model, lane: Lane, history: list[Op], batch: int
):
    play(tiny, lane, history, batch)


@pytest.mark.filterwarnings("error:The new tokens start")
@given(history=histories(scored=True), batch=st.integers(1, 2))
@example(history=[("read", 0), ("H2O", 1), ("read", 2), ("TOVA", 3), ("read", 4), ("SnapKV", 5), ("read", 6)], batch=2)
@settings(max_examples=8)
def test_any_history_under_attention_policies_equals_one_pass_without_a_cache(
    tiny: Model, history: list[Op], batch: int
):
    play(tiny, "hooked", history, batch, watched=True)


def scaled(rope_type: str, **settings: float) -> Model:
    return llama(rope_parameters={"rope_type": rope_type, "rope_theta": 1e4} | settings)


def cohere() -> Model:
    """Neighbouring numbers of a key turn together."""
    return _model(transformers.CohereForCausalLM, transformers.CohereConfig(**_GQA), 0, None)


def two_bases() -> Model:
    """Keys turn faster in layers with a window than in the full one, whose frequencies are scaled besides."""
    windowed = {"rope_type": "default", "rope_theta": 100.0}
    full = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5}
    return gemma3(rope_parameters={"sliding_attention": windowed, "full_attention": full})


VARIANTS: dict[str, Callable[[], Model]] = {
    "linear": lambda: scaled("linear", factor=4.0),
    "llama3": lambda: scaled(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
    ),
    "yarn": lambda: scaled("yarn", factor=4.0, original_max_position_embeddings=128),
    "cohere": cohere,
    "two bases": two_bases,
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.filterwarnings("error:The new tokens start")
def test_any_history_equals_one_pass_with_every_rotary_embedding(variant: str):
    model = VARIANTS[variant]()

    @given(history=histories(), batch=st.integers(1, 2))
    @example(history=EVERYTHING, batch=2)
    @settings(max_examples=8)
    def holds(history: list[Op], batch: int) -> None:
        play(model, "plain", history, batch)

    holds()


CLOSED: list[Op] = [("read", 1), ("read", 2), ("evict", 3), ("reindex", 4), ("read", 5)]


def changed(model: Model, change: Callable[[Row], Any]) -> float:
    """How far the oracle's logits go when the row that it computes is changed."""
    row = play(model, "plain", CLOSED).rows[0]
    before = whole_pass(model, row).logits
    change(row)
    return relative_difference(whole_pass(model, row).logits, before)


def test_the_oracle_depends_on_rotations_masks_and_positions(tiny_gemma: Model):
    def unturned(row: Row) -> None:
        last = row.readings[-1]
        assert any(last.turns)
        row.readings[-1] = type(last)(last.positions, (0,) * len(last.turns), last.alive)

    def seen(row: Row) -> None:
        assert not bool(row.readings[-1].alive.all())
        row.readings[-1].alive[:] = True

    def elsewhere(row: Row) -> None:
        row.read_at[-1] += 5

    for change in (unturned, seen, elsewhere):
        assert changed(tiny_gemma, change) > 1e-3, change.__name__
