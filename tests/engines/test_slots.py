"""Saved slots of llama.cpp, against the engine itself in this process and tiny models in float32.

Without flash attention and with a cache in f32, llama.cpp computes these models as transformers does, to 1e-6.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import kvprobe as kv
from kvprobe.cache.cache import KVCache
from kvprobe.engines.llamacpp import from_slot, open_slot, pairs, to_slot
from kvprobe.engines.server import LlamaServer, served
from kvprobe.engines.slot import read_slot, stored, write_slot
from kvprobe.faults import FaultContext, Gaussian
from kvprobe.inference.model import Model
from kvprobe.patching import aligned
from kvprobe.text.tokens import Tokens
from tests.models import gemma3, llama, qwen3, tiny_tokenizer
from tests.models.gguf_file import write_gguf
from tests.refusals import refused

IDS = torch.randint(2, 60, (30,), generator=torch.Generator().manual_seed(0)).tolist()
NEXT = [7, 9]
HIDDEN = [4, 5, 6, 7, 8, 20, 21]
CLOSE = {"llama": 5e-6, "qwen3": 5e-6, "gemma3": 2e-3}
"""Log-probabilities of a whole prompt differ by 1e-6, in Gemma by 6e-4: llama.cpp looks up its GELU in halves."""
KINDS: dict[str, tuple[Callable[..., Model], dict[str, Any]]] = {
    "llama": (llama, {}),
    "qwen3": (qwen3, {}),
    # Two layers slide over 8 slots; llama.cpp takes a pattern, or its own.
    "gemma3": (gemma3, {"arch__attention__sliding_window_pattern": 3}),
}


class Engine:
    """A model, and llama.cpp with the same weights."""

    def __init__(self, name: str, folder: Path, stack: ExitStack) -> None:
        build, changes = KINDS[name]
        self.close = CLOSE[name]
        self.model = build(tokenizer=tiny_tokenizer())
        self.gguf = write_gguf(self.model, folder / f"{name}.gguf", **changes)
        self.server: LlamaServer = stack.enter_context(
            served(self.gguf, cache="f32", context=64, slots=2, threads=1, flash=False)
        )

    def saved(self, name: str, ids: list[int] = IDS, slot: int = 0) -> Path:
        self.server.complete(ids, reuse=False, slot=slot)
        self.server.save(slot, name)
        return self.server.path(name)

    def after(self, path: Path, slot: int = 0) -> torch.Tensor:
        """Log-probabilities when the engine goes on from a slot, having computed none of it again."""
        self.server.erase(slot)
        held = read_slot(path).tokens
        answer = self.server.go_on(path.name, [*held, *NEXT], n_probs="all", slot=slot)
        assert answer.reused == len(held)
        (given,) = answer.log_probabilities
        return torch.tensor([given[token] for token in range(len(given))])

    def goes_on(self, cache: KVCache) -> torch.Tensor:
        return self.model.extend(cache, Tokens.of(NEXT, start=int(cache.ledger.following[0])))[1][0, -1].log_softmax(-1)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    with ExitStack() as stack:
        yield {name: Engine(name, tmp_path_factory.mktemp("gguf"), stack) for name in KINDS}


@pytest.fixture(params=[*KINDS])
def engine(engines: dict[str, Engine], request: pytest.FixtureRequest) -> Engine:
    return engines[request.param]


def test_a_slot_holds_what_the_model_computes(engine: Engine):
    cache, true = from_slot(engine.saved("a"), engine.model), engine.model.prefill(Tokens.of(IDS))
    assert cache.ledger.tokens.tolist() == [IDS]
    assert cache.ledger.positions.equal(true.ledger.positions)
    assert cache.ledger.following.equal(true.ledger.following)
    live = cache.ledger.live.expand(true.n_layers, -1, -1, -1)[:, 0, 0]
    for own, other, shown in zip(cache.layers, true.layers, live, strict=True):
        for name in ("K", "V"):
            assert torch.allclose(own[name][:, :, shown], other[name][:, :, shown], rtol=0, atol=2 * engine.close)
    assert torch.allclose(engine.goes_on(cache), engine.goes_on(true), rtol=0, atol=engine.close)


def test_a_round_trip_changes_no_byte_and_no_answer(engine: Engine):
    path = engine.saved("a", slot=1)
    before = engine.after(path, slot=1)
    again = to_slot(from_slot(path, engine.model), engine.server.path("b"), path, engine.model)
    assert again.path.read_bytes() == path.read_bytes()[: again.path.stat().st_size]
    assert torch.allclose(engine.after(again.path, slot=1), before, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "edit",
    [
        lambda cache: cache.mask(slots=HIDDEN),
        lambda cache: cache.evict(slots=HIDDEN),
        lambda cache: cache.mask(slots=HIDDEN).reindex(),
        lambda cache: cache.mask(slots=HIDDEN).reindex("naive"),
        lambda cache: cache.rewind(slots=29),  # a slot of Gemma holds what one token fewer sees, too
    ],
    ids=["masked", "evicted", "re-indexed", "naive", "taken back"],
)
def test_an_edited_slot_is_read_by_llama_cpp_as_by_transformers(engine: Engine, edit: Callable[[KVCache], KVCache]):
    path = engine.saved("a")
    cache = edit(from_slot(path, engine.model))
    given, true = engine.after(to_slot(cache, engine.server.path("b"), path, engine.model).path), engine.goes_on(cache)
    assert torch.allclose(given, true, rtol=0, atol=engine.close)
    assert not torch.allclose(given, engine.after(path), rtol=0, atol=5 * engine.close)


def test_a_slot_patched_from_another_conversation_answers_as_in_transformers(engines: dict[str, Engine]):
    engine = engines["llama"]
    path = engine.saved("a")
    donor = from_slot(engine.saved("c", [*IDS[:10], *IDS[12:], 3, 4]), engine.model)
    cache = from_slot(path, engine.model).patch(donor, slots=[15, 16, 17], part="V")
    given = engine.after(to_slot(cache, engine.server.path("b"), path, engine.model).path)
    assert torch.allclose(given, engine.goes_on(cache), rtol=0, atol=engine.close)


@pytest.mark.parametrize(("kind", "flash"), [("f16", False), ("f16", True), ("q8_0", True), ("q4_0", True)])
def test_caches_of_other_types_come_back_bit_for_bit_and_near_the_model(tmp_path: Path, kind: Any, flash: bool):
    model = llama(tokenizer=tiny_tokenizer(), head_dim=64)
    gguf = write_gguf(model, tmp_path / "m.gguf")
    with served(gguf, cache=kind, context=64, threads=1, flash=flash) as server:
        server.complete(IDS)
        server.save(0, "a")
        slot = read_slot(server.path("a"))
        assert [slot.attention[0].keys[0].kind.name.lower(), slot.attention[0].values[0].transposed] == [
            kind,
            not flash,
        ]
        assert write_slot(tmp_path / "b", stored(slot), slot).path.read_bytes() == server.path("a").read_bytes()
        assert to_slot(from_slot(server.path("a"), model), tmp_path / "c", server.path("a"), model)
        assert (tmp_path / "c").read_bytes() == server.path("a").read_bytes()
    ((true, cache),) = pairs(model, gguf, [Tokens.of(IDS)], cache=kind, flash=flash)
    off = max(
        float((own - other).norm() / other.norm())
        for one, two in zip(cache.layers, true.layers, strict=True)
        for own, other in ((one[name], two[name]) for name in ("K", "V"))
    )
    assert off < {"f16": 1e-3, "q8_0": 1e-2, "q4_0": 0.25}[kind]
    assert cache.ledger.engine == f"llama.cpp {kind}"


@pytest.mark.parametrize("flash", [False, True])
def test_nan_comes_back_from_the_server_bit_for_bit(engines: dict[str, Engine], tmp_path: Path, flash: bool):
    model, gguf = engines["llama"].model, engines["llama"].gguf
    with served(gguf, cache="f16", context=64, threads=1, flash=flash) as server:
        server.complete(IDS)
        server.save(0, "a")
        whole, memory = server.path("a").read_bytes(), read_slot(server.path("a")).attention[0]
        for rows in (*memory.keys, *memory.values):  # those of layer 0 prove whose the slot is
            at = rows.start + 40
            server.path("a").write_bytes(whole[:at] + b"\x01\x7d\x00\x7c" + whole[at + 4 :])
            cache = from_slot(server.path("a"), model)
            refused(cache.refuse_nonfinite, "holds NaN or infinity")
            to_slot(cache, server.path("b"), server.path("a"), model)
            assert server.path("b").read_bytes() == server.path("a").read_bytes()
            server.restore(0, "b")
            server.save(0, "c")
            assert server.path("c").read_bytes() == server.path("a").read_bytes()


def test_without_a_model_a_slot_is_shown_as_it_lies_and_says_what_it_lacks(engines: dict[str, Engine]):
    engine = engines["llama"]
    path = engine.saved("a")
    held = open_slot(path)
    assert "how many heads" in held.lacks
    kv.save_plain(held, path.parent / "copy.json")
    assert kv.open_cache(path.parent / "copy.json").lacks == held.lacks
    assert held.layers[0]["K"].shape == (1, 1, len(IDS), 16)
    known = kv.open_cache(path, engine.model)
    assert known.lacks == ""
    assert held.layers[1]["K"][0, 0, :, :8:2].equal(known.layers[1]["K"][0, 0, :, :4])
    masked = write_slot(engine.server.path("b"), held.cache().mask(slots=HIDDEN), read_slot(path))
    true = engine.model.prefill(Tokens.of(IDS)).mask(slots=HIDDEN)
    assert torch.allclose(engine.after(masked.path), engine.goes_on(true), rtol=0, atol=engine.close)


def test_segments_come_from_the_text(engines: dict[str, Engine]):
    engine = engines["llama"]
    path = engine.saved("a")
    text = Tokens.of(IDS[:10], "first") + Tokens.of(IDS[10:25], "second", 10)
    cache = from_slot(path, engine.model, text)
    assert cache.ledger.names == ("first", "second", "generated")
    by_name = engine.after(to_slot(cache.mask("second"), engine.server.path("b"), path, engine.model).path)
    assert torch.allclose(by_name, engine.goes_on(cache.mask("second")), rtol=0, atol=engine.close)
    other = Tokens.of([1, *IDS[1:]])
    refused(lambda: from_slot(path, engine.model, other), "another than the slot holds", "position 0")
    refused(lambda: from_slot(path, engine.model, [text, text]), "one text, and these are 2")
    with_gap = Tokens.of(IDS[:10]) + Tokens.of(IDS[15:25], start=15)
    refused(lambda: from_slot(path, engine.model, with_gap), "another than the slot holds", "position 10")


def test_what_cannot_be_proved_or_expressed_is_refused(engines: dict[str, Engine]):
    engine, path = engines["llama"], engines["llama"].saved("a")
    other = llama(seed=1, tokenizer=tiny_tokenizer())
    refused(lambda: from_slot(path, other), "K of layer 0", "not what")
    refused(lambda: from_slot(path, engines["qwen3"].model), "K of layer 0")
    refused(lambda: from_slot(path, engines["gemma3"].model), "layer 0")
    for heads_of_another_size in (llama(head_dim=4), qwen3(head_dim=4)):
        refused(lambda model=heads_of_another_size: open_slot(path, model), "16 numbers", "not of 2 heads")
    refused(lambda: from_slot(engines["gemma3"].saved("g"), engine.model), "layers")
    cache = from_slot(path, engine.model)
    moved, out = cache.evict(slots=[2]).reindex(), engine.server.path("b")
    refused(lambda: to_slot(cache.mask(slots=[3], layers=[1]), out, path, engine.model), "some layers or heads")
    refused(lambda: to_slot(cache.mask(slots=[*range(30)]), out, path, engine.model), "a live slot")
    refused(lambda: to_slot(cache.fork(2), out, path, engine.model), "2 rows")
    refused(lambda: to_slot(cache.mask(slots=[29]), out, path, engine.model), "position 29, is not live")
    refused(
        lambda: write_slot(out, moved, read_slot(path)),
        "rotated",
    )


def test_the_servers_own_shift_is_eviction_and_re_indexing(engines: dict[str, Engine], tmp_path: Path):
    model, size = engines["llama"].model, 256
    ids = torch.randint(2, 60, (size - 1,), generator=torch.Generator().manual_seed(1)).tolist()
    with served(engines["llama"].gguf, cache="f32", context=size, threads=1, flash=False, shift=True) as server:
        server.complete(ids)
        server.save(0, "full")
        server.complete(ids, 2, reuse=False, forget=(10, 100))
        server.save(0, "shifted")
        evicted = model.as_seen(from_slot(server.path("full"), model).evict(slots=[*range(10, 110)]).reindex())
        shifted = from_slot(server.path("shifted"), model)
    assert shifted.ledger.tokens[0, : size - 101].tolist() == ids[:10] + ids[110:]
    for own, other in zip(shifted.layers, evicted.layers, strict=True):
        assert torch.equal(own["V"][:, :, : size - 101], other["V"])
        assert torch.allclose(own["K"][:, :, : size - 101], other["K"], rtol=0, atol=5e-6)


def test_an_edit_that_the_server_reads_over_is_refused(engines: dict[str, Engine]):
    engine = engines["gemma3"]
    with served(engine.gguf, cache="f32", context=64, threads=1, flash=False, whole=False) as server:
        server.complete(IDS)
        server.save(0, "a")
        cache = from_slot(server.path("a"), engine.model).mask(slots=HIDDEN)
        to_slot(cache, server.path("b"), server.path("a"), engine.model)
        refused(lambda: server.go_on("b", [*IDS, *NEXT]), "what was edited in it is lost", "--swa-full")
    path = engine.saved("a")
    refused(lambda: engine.server.go_on("a", [1, *IDS[1:], *NEXT]), "tokens that begin with the slot's")
    assert engine.server.go_on(path.name, [*IDS, *NEXT]).reused == len(IDS)


def test_slots_that_left_a_window_and_would_come_back_are_refused(engines: dict[str, Engine], tmp_path: Path):
    engine = engines["gemma3"]
    path = engine.saved("a")
    cache, out = from_slot(path, engine.model, Tokens.of(IDS)), engine.server.path("b")
    assert cache.ledger.dropped[0].nonzero()[:, 0].tolist() == [*range(22)]
    cache.save(tmp_path / "a.kv")
    assert KVCache.load(tmp_path / "a.kv").ledger.dropped.equal(cache.ledger.dropped)
    shorter = cache.rewind(slots=29)  # its window of 8 begins at 22
    given, true = engine.after(to_slot(shorter, out, path, engine.model).path), engine.goes_on(shorter)
    assert torch.allclose(given, true, rtol=0, atol=engine.close)
    whole = engine.model.prefill(Tokens.of(IDS)).rewind(slots=29)
    assert torch.allclose(given, engine.goes_on(whole), rtol=0, atol=engine.close)
    coming_back: list[Callable[[KVCache], KVCache]] = [
        lambda cache: cache.rewind(slots=28),
        lambda cache: cache.rewind(position=25),
        lambda cache: cache.mask(slots=[23, 24, 25]).reindex(),
        lambda cache: cache.evict(slots=[23, 24, 25]).reindex(),
        lambda cache: KVCache.join([cache, cache]).rows([1]).rewind(slots=25),
    ]
    for edit in coming_back:
        edited = edit(cache)
        refused(lambda edited=edited: engine.goes_on(edited), "Going on needs slot", "read the text again")
        refused(lambda edited=edited: to_slot(edited, out, path, engine.model), "needs slot", "read the text again")
        refused(lambda edited=edited: engine.model.generate(edited, "and"), "Going on needs slot")
        refused(lambda edited=edited: engine.model.capture(NEXT, ["v"], past=edited), "Going on needs slot")
        hidden = edited.mask(slots=[*range(10, 22)])
        assert engine.goes_on(hidden).isfinite().all()
    donor = engine.model.prefill(Tokens.of(IDS))
    for base, other in ((cache, donor), (donor, cache)):
        refused(lambda base=base, other=other: base.patch(other, slots=[3]), "needs slot 3 of row 0 in all layers")
        assert torch.equal(base.patch(other, slots=[25]).keys[0][:, :, 25], other.keys[0][:, :, 25])
        refused(lambda base=base, other=other: aligned(engine.model, base, other), "of a patch needs slot 0 of row 0")
    refused(lambda: FaultContext(donor, {"other": cache}), "Donor 'other' needs slot 0")
    refused(lambda: cache.corrupt(Gaussian("layer")), "Such a fault needs slot 0")


def test_absurd_counts_unknown_versions_and_types_are_refused(engines: dict[str, Engine], tmp_path: Path):
    whole, path = engines["llama"].saved("a").read_bytes(), tmp_path / "slot"
    memory = 12 + 4 * (len(IDS) + 4)
    layer = memory + 8 + 12 * len(IDS) + 16
    for at, words in {
        4: "version",
        8: "entries follow",
        16: "list of tokens",
        memory: "streams",
        memory + 4: "entries follow",
        memory + 8: "positions beyond",
        memory + 12: "several conversations",
        layer - 12: "layers",
        layer - 8: "turned",
        layer: "f32, f16, q8_0",
        layer + 4: "would end at byte",
    }.items():
        path.write_bytes(whole[:at] + b"\xf4\xff\xff\x7f" + whole[at + 4 :])
        refused(lambda: kv.open_cache(path), words, "save it again")
    path.write_bytes(whole + b"more")
    refused(lambda: kv.open_cache(path), "slot")
