"""The connector without vLLM: where a back end keeps numbers, what can be loaded, and what is done in which step. With
vLLM, `make engines` holds it to transformers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvprobe as kv
from kvprobe.cache.stored import StoredCache
from kvprobe.engines.plain import open_plain
from kvprobe.engines.vllm import KvprobeConnector, Transfers, gathered, loadable, places_in_block, put
from tests.random_caches import random_cache
from tests.refusals import refused

BLOCK, HEADS, D_KEY, D_VALUE = 8, 2, 6, 4
Kernel = Callable[[Tensor, int, Tensor, Tensor], None]


def packed(pool: Tensor, block: int, keys: Tensor, values: Tensor) -> None:
    """[blocks, heads, slots, K then V]."""
    pool[block] = torch.cat([keys, values], -1).transpose(0, 1)


def apart(pool: Tensor, block: int, keys: Tensor, values: Tensor) -> None:
    """All K of a block before all V."""
    pool[block] = torch.cat([keys.flatten(), values.flatten()]).view_as(pool[block])


def transposed(pool: Tensor, block: int, keys: Tensor, values: Tensor) -> None:
    """In each head K by channel and then V by slot, as vLLM's kernel on a CPU."""
    by_channel = keys.permute(1, 2, 0).flatten(1)
    pool[block] = torch.cat([by_channel, values.transpose(0, 1).flatten(1)], 1).view_as(pool[block])


def rounded(pool: Tensor, block: int, keys: Tensor, values: Tensor) -> None:
    packed(pool, block, (keys / 4).round() * 4, values)


def half(pool: Tensor, block: int, keys: Tensor, values: Tensor) -> None:
    pool[block][:, : BLOCK // 2] = torch.cat([keys, values], -1).transpose(0, 1)[:, : BLOCK // 2]


def a_pool(dtype: torch.dtype = torch.float32, blocks: int = 5) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(blocks, HEADS, BLOCK, D_KEY + D_VALUE, generator=rng).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", [packed, apart, transposed])
def test_numbers_are_found_where_the_kernel_puts_them_and_are_put_where_it_finds_them(
    kernel: Kernel, dtype: torch.dtype
):
    pool = a_pool(dtype)
    before, table = pool.clone(), [3, 1]
    places = places_in_block(pool, lambda k, v: kernel(pool, 0, k, v), BLOCK, HEADS, D_KEY, D_VALUE)
    assert torch.equal(pool, before)
    keys, values = (torch.randn(2 * BLOCK, HEADS, width).to(dtype) for width in (D_KEY, D_VALUE))
    for number, block in enumerate(table):
        kernel(pool, block, *(part[number * BLOCK :][:BLOCK] for part in (keys, values)))
    for part, where in ((keys, places.keys), (values, places.values)):
        assert torch.equal(gathered(pool, table, where, 11), part[:11].transpose(0, 1)[None])
        put(before, table, where, part.transpose(0, 1)[None])
    assert torch.equal(before, pool)


@pytest.mark.parametrize("kernel", [rounded, half])
def test_a_kernel_that_does_not_keep_each_number_once_is_refused(kernel: Kernel):
    pool = a_pool()
    refused(lambda: places_in_block(pool, lambda k, v: kernel(pool, 0, k, v), BLOCK, HEADS, D_KEY, D_VALUE), "back end")


@pytest.mark.usefixtures("unchecked")
def test_bytes_of_quantised_numbers_are_refused():
    pool = a_pool().to(torch.uint8)
    refused(lambda: places_in_block(pool, lambda k, v: None, BLOCK, HEADS, D_KEY, D_VALUE), "uint8")


@pytest.mark.usefixtures("unchecked")
def test_a_cache_of_another_dtype_or_shape_is_not_put():
    pool = a_pool()
    places = places_in_block(pool, lambda k, v: packed(pool, 0, k, v), BLOCK, HEADS, D_KEY, D_VALUE)
    for other in (torch.zeros(1, HEADS, BLOCK, D_KEY).half(), torch.zeros(1, HEADS, BLOCK, D_VALUE)):
        refused(lambda other=other: put(pool, [1], places.keys, other), "same model and dtype")


def test_a_cache_is_loaded_for_whole_blocks_of_its_own_prompt_alone():
    cache = random_cache(0, batch=1, slots=2 * BLOCK)
    prompt = [*cache.ledger.tokens[0].tolist(), 1]
    assert loadable(stored(cache), prompt, BLOCK) == 2 * BLOCK
    refused(lambda: loadable(stored(cache), prompt[:-1], BLOCK), f"at most {BLOCK} slots")
    refused(lambda: loadable(stored(cache), [*prompt[1:], 1], BLOCK), "other tokens")
    refused(lambda: loadable(stored(cache.rewind(slots=BLOCK + 3)), prompt, BLOCK), f"rewind(slots={BLOCK})")
    refused(lambda: loadable(stored(cache.mask(slots=[3])), prompt, BLOCK), "masked")
    refused(lambda: loadable(stored(cache.mask(slots=[3], layers=[1])), prompt, BLOCK), "masked")
    refused(lambda: loadable(stored(cache.evict(slots=[3])), prompt, BLOCK), "gapped")
    refused(lambda: loadable(stored(cache.evict(slots=[3]).reindex()), prompt, BLOCK), "gapped")
    refused(lambda: loadable(stored(random_cache(0, batch=2)), prompt, BLOCK), "several rows")
    last = cache.evict(slots=range(BLOCK, 2 * BLOCK))  # what comes next keeps its distance
    refused(lambda: loadable(stored(last), prompt, BLOCK), "gap at its end")
    assert loadable(stored(last.reindex()), prompt, BLOCK) == BLOCK
    refused(lambda: loadable(replace(stored(cache), lacks="It holds no states."), prompt, BLOCK), "no states")


def stored(cache: kv.KVCache) -> StoredCache:
    return StoredCache(cache.layers, cache.ledger, "a test")


@dataclass
class FullAttentionSpec:
    """As much of vLLM's as is looked at."""

    block_size: int = BLOCK


class SlidingWindowSpec(FullAttentionSpec): ...


class Engine:
    """As much of vLLM as calls a connector: three layers, whose kernel is `transposed`, and blocks in any order."""

    def __init__(self, folder: Path, spec: object = None, **other: Any) -> None:
        self.pools = {f"model.layers.{number}.self_attn.attn": a_pool(blocks=9) for number in (2, 0, 1)}
        layer = SimpleNamespace(impl=self, num_kv_heads=HEADS, head_size=D_KEY, head_size_v=D_VALUE, attn_backend=self)
        settings = {
            "cache_config": SimpleNamespace(block_size=BLOCK, enable_prefix_caching=False),
            "kv_transfer_config": SimpleNamespace(get_from_extra_config=lambda name, default: str(folder)),
            "parallel_config": SimpleNamespace(world_size=1),
            "speculative_config": None,
            "model_config": SimpleNamespace(use_mla=False, model="tiny"),
            "compilation_config": SimpleNamespace(static_forward_context=dict.fromkeys(self.pools, layer)),
        }
        self.connector: Any = _Testable(
            SimpleNamespace(**settings | other),
            None,
            SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec or FullAttentionSpec())]),
        )
        self.connector.register_kv_caches(self.pools)

    def do_kv_cache_update(self, layer: object, keys: Tensor, values: Tensor, pool: Tensor, slots: Tensor) -> None:
        transposed(pool, int(slots[0]) // BLOCK, keys, values)

    def get_name(self) -> str:
        return "TRANSPOSED"

    def step(self, new: Any = (), again: Any = (), *, computed: dict[str, int], resumed: Any = ()) -> Transfers:
        """A step of these new requests, of these with more blocks, and of so many tokens of each."""
        cached = SimpleNamespace(
            req_ids=[name for name, *_ in again],
            new_block_ids=[blocks for _, blocks, _ in again],
            num_computed_tokens=[before for *_, before in again],
            resumed_req_ids=set(resumed),
        )
        output = SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            num_scheduled_tokens=computed,
            finished_req_ids=set(),
        )
        self.connector.transfers = self.connector.build_connector_meta(output)
        self.connector.start_load_kv(None)
        return self.connector.transfers


class _Base:
    """As much of vLLM's base class as is used."""

    transfers: Transfers

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self.role = role

    def _get_connector_metadata(self) -> Transfers:
        return self.transfers


class _Testable(KvprobeConnector, _Base): ...


def request(tokens: list[int], blocks: list[int], name: str = "r", **parameters: str) -> Any:
    sampling = SimpleNamespace(extra_args={"kv_transfer_params": parameters})
    return SimpleNamespace(
        req_id=name, prompt_token_ids=tokens, mm_features=[], sampling_params=sampling, num_computed_tokens=0,
        block_ids=(blocks,), kv_transfer_params=parameters, skip_reading_prefix_cache=False, request_id=name,
        prompt_embeds=None, lora_request=None,
    )  # fmt: skip


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path)


def test_a_prompt_that_is_read_in_chunks_is_dumped_once_and_whole(engine: Engine, tmp_path: Path):
    cache = random_cache(0, batch=1, slots=19, kv_heads=HEADS, d_head=D_KEY)
    cache = cache.with_parts({"V": [values[..., :D_VALUE] for values in cache.values]})
    prompt, table = cache.ledger.tokens[0].tolist(), [7, 2, 5]
    for number, layer in enumerate(cache.layers):
        padded = {name: torch.nn.functional.pad(part[0], (0, 0, 0, 5)).transpose(0, 1) for name, part in layer.items()}
        for index, block in enumerate(table):
            here = slice(index * BLOCK, (index + 1) * BLOCK)
            pool = engine.pools[f"model.layers.{number}.self_attn.attn"]
            transposed(pool, block, padded["K"][here], padded["V"][here])
    assert not engine.step([request(prompt, [1], dump="a.json")], computed={"r": 8}).dumps
    assert not engine.step(again=[("r", ([7, 2],), 0)], computed={"r": 10}, resumed=["r"]).dumps
    assert len(engine.step(again=[("r", ([5],), 10)], computed={"r": 9}).dumps) == 1
    engine.connector.wait_for_save()
    dumped = open_plain(tmp_path / "a.json")
    for ours, theirs in zip(dumped.cache().tensors, cache.tensors, strict=True):
        assert torch.equal(ours, theirs)
    assert (dumped.ledger.tokens[0].tolist(), dumped.block) == (prompt, BLOCK)
    assert "TRANSPOSED" in dumped.origin
    assert not engine.step(again=[("r", None, 19)], computed={"r": 1}).dumps


def test_a_cache_that_is_loaded_is_what_is_dumped_of_its_blocks(engine: Engine, tmp_path: Path):
    cache = random_cache(1, batch=1, slots=2 * BLOCK, kv_heads=HEADS, d_head=D_KEY)
    cache = cache.with_parts({"V": [values[..., :D_VALUE] for values in cache.values]})
    kv.save_plain(cache, tmp_path / "edited.json")
    asked = request([*cache.ledger.tokens[0].tolist(), 3, 4], [4, 6, 1], load="edited.json", dump="again.json")
    assert engine.connector.get_num_new_matched_tokens(asked, 0) == (2 * BLOCK, False)
    engine.connector.update_state_after_alloc(asked, None, 2 * BLOCK)
    asked.num_computed_tokens = 2 * BLOCK
    assert len(engine.step([asked], computed={"r": 2}).loads) == 1
    engine.connector.wait_for_save()
    for ours, theirs in zip(open_plain(tmp_path / "again.json").cache().tensors, cache.tensors, strict=True):
        assert torch.equal(ours[:, :, : 2 * BLOCK], theirs)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"dumps": "a.json"}, "'dump'"),
        ({"dump": "a.safetensors"}, "JSON"),
        ({"dump": "../a.json"}, "JSON"),
        ({"dump": "/a.json"}, "JSON"),
        ({"load": ".json"}, "JSON"),
        ({"load": 3}, "JSON"),
        (["a.json"], "expected {'dump': FILE}"),
    ],
    ids=str,
)
def test_a_request_that_names_no_file_of_the_folder_is_refused(parameters: Any, words: str, engine: Engine):
    asked = request([1, 2], [1])
    asked.sampling_params.extra_args["kv_transfer_params"] = parameters
    refused(lambda: engine.step([asked], computed={"r": 2}), words)


def test_a_load_that_vllm_would_pass_over_or_keep_for_others_is_refused(engine: Engine):
    asked = request([1, 2], [1], load="a.json")
    asked.skip_reading_prefix_cache = True
    refused(lambda: engine.connector.get_num_new_matched_tokens(asked, 0), "prompt_logprobs")
    engine.connector._config.cache_config.enable_prefix_caching = True
    refused(lambda: engine.connector.get_num_new_matched_tokens(asked, 0), "enable_prefix_caching=False")


def test_an_engine_that_was_not_proved_is_refused(tmp_path: Path):
    refused(lambda: Engine(tmp_path / "none"), "no folder")
    refused(lambda: Engine(tmp_path, parallel_config=SimpleNamespace(world_size=2)), "several devices")
    refused(lambda: Engine(tmp_path, model_config=SimpleNamespace(use_mla=True, model="m")), "latent")
    refused(lambda: Engine(tmp_path, SlidingWindowSpec()), "SlidingWindowSpec, where FullAttentionSpec keeps")
    refused(lambda: Engine(tmp_path, FullAttentionSpec(2 * BLOCK)), f"other sizes than {BLOCK} slots")
    Engine(tmp_path, SimpleNamespace(kv_cache_specs={"0": FullAttentionSpec(), "1": FullAttentionSpec()}))
    mixed = SimpleNamespace(kv_cache_specs={"0": FullAttentionSpec(), "1": SlidingWindowSpec()})
    refused(lambda: Engine(tmp_path, mixed), "SlidingWindowSpec")


def test_a_request_whose_cache_is_not_that_of_its_tokens_and_the_model_is_refused(engine: Engine):
    for words, change in {"pictures": {"prompt_embeds": 0}, "an adapter": {"lora_request": "adapter"}}.items():
        other = SimpleNamespace(**vars(request([1, 2], [1], dump="a.json")) | change)
        refused(lambda other=other: engine.step([other], computed={"r": 2}), words)
    twice = [request([1, 2], [1], dump="a.json"), request([1, 3], [2], "s", dump="a.json")]
    refused(lambda: engine.step(twice, computed={"r": 2, "s": 2}), "Two prompts would be dumped to a.json")
    alike = [request([1, 2], [1], dump="b.json"), request([1, 2], [2], "s", dump="b.json")]
    assert len(engine.step(alike, computed={"r": 2, "s": 2}).dumps) == 2


def test_a_cache_that_vllm_does_not_take_whole_is_not_computed_in_silence(engine: Engine, tmp_path: Path):
    cache = random_cache(1, batch=1, slots=2 * BLOCK, kv_heads=HEADS, d_head=D_KEY)
    kv.save_plain(cache, tmp_path / "edited.json")
    asked = request([*cache.ledger.tokens[0].tolist(), 3], [4, 6, 1], load="edited.json")
    refused(lambda: engine.step([asked], computed={"r": 2 * BLOCK + 1}), "0 of the 16 slots")
    engine.connector.update_state_after_alloc(asked, None, BLOCK)
    refused(lambda: engine.step([asked], computed={"r": BLOCK + 1}), "8 of the 16 slots")


def test_a_request_that_is_preempted_loads_its_cache_again(engine: Engine, tmp_path: Path):
    cache = random_cache(1, batch=1, slots=BLOCK, kv_heads=HEADS, d_head=D_KEY)
    kv.save_plain(cache.with_parts({"V": [part[..., :D_VALUE] for part in cache.values]}), tmp_path / "edited.json")
    asked = request([*cache.ledger.tokens[0].tolist(), 3], [4, 6], load="edited.json")
    engine.connector.update_state_after_alloc(asked, None, BLOCK)
    assert [load.blocks for load in engine.step([asked], computed={"r": 1}).loads] == [[4]]
    assert not engine.step(again=[("r", None, BLOCK + 1)], computed={"r": 1}).loads
    engine.connector.update_state_after_alloc(asked, None, BLOCK)
    again = engine.step(again=[("r", ([7, 2],), BLOCK)], computed={"r": 2}, resumed=["r"])
    assert [load.blocks for load in again.loads] == [[7]]
    refused(lambda: engine.step(again=[("r", ([7, 2],), 0)], computed={"r": 10}, resumed=["r"]), "0 of the 8 slots")
