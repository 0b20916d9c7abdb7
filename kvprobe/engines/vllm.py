"""A connector by which vLLM writes the caches of chosen requests as plain dumps, and goes on from edited ones.

vLLM loads `KvprobeConnector` from this module by name (`kv_connector_module_path="kvprobe.engines.vllm"`). A request
says what it wants in its `kv_transfer_params`: `{"dump": "a.json"}` writes the cache of its prompt, and
`{"load": "b.json"}` puts a cache in place of the first blocks of its prompt. Both name files in the connector's folder.

How a back end arranges K and V in a block is asked of the back end: its own kernel writes numbered entries into block
0, which vLLM keeps for nothing, and where each of them is found is where such an entry lies in every block. A layout
that does not keep every number once, as it was, is refused.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.layer import named as part_of
from kvprobe.cache.ledger import Ledger
from kvprobe.cache.stored import StoredCache
from kvprobe.checks import is_mapping
from kvprobe.engines.files import open_file
from kvprobe.engines.formats import VLLM, installed
from kvprobe.engines.plain import save_plain
from kvprobe.errors import UserError
from kvprobe.files import expanded
from kvprobe.names import one_line, shown, unknown

try:
    _vllm: Any = import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    _Connector: Any = _vllm.KVConnectorBase_V1
except ImportError:  # everything else here works without vLLM
    _Connector = object

BASE = 128
"""Numbers of an entry are written digit by digit; digits up to this are exact in bfloat16."""
_KEPT = "FullAttentionSpec"
"""What vLLM calls layers of which it keeps the slots of all tokens."""
_FILE = re.compile(r"[A-Za-z0-9][\w.-]{0,99}")


class Places(NamedTuple):
    """Where a block, flattened, holds the numbers of K and V."""

    keys: Int[Tensor, "block heads d_key"]
    values: Int[Tensor, "block heads d_value"]


Write = Callable[[Float[Tensor, "block heads d_key"], Float[Tensor, "block heads d_value"]], None]
"""Writes K and V of the slots of block 0, as the back end does."""


def places_in_block(
    pool: Float[Tensor, "blocks ..."], write: Write, block: int, heads: int, d_key: int, d_value: int
) -> Places:
    """Where a back end keeps each number of a block, found by letting it write known ones; block 0 is left as it was.

    Raises:
        UserError: it does not keep every number once, as it was: it rounds, say, or has other blocks.
    """
    size, count = heads * d_key, block * heads * (d_key + d_value)
    before, codes = pool[0].clone(), torch.arange(count, device=pool.device)
    found = torch.zeros(before.numel(), dtype=torch.long, device=pool.device)
    exact = pool.is_floating_point()
    digit = 1
    while digit < count and exact:
        numbers = (codes // digit % BASE + 1).to(pool.dtype)
        pool[0] = 0
        write(numbers[: block * size].view(block, heads, d_key), numbers[block * size :].view(block, heads, d_value))
        read = pool[0].flatten().float()
        exact = bool((read == read.round()).all()) and int((read != 0).sum()) == count
        found += (read.nan_to_num().long() - 1) * digit
        digit *= BASE
    filled = (found >= 0).nonzero().flatten()
    pool[0] = before
    if not exact or not torch.equal(found[filled].sort().values, codes):
        raise UserError(
            f"This attention back end does not keep {block} slots of {heads} heads in a block as {pool.dtype} numbers, "
            "each once and as it was; choose another back end, block size or dtype of the cache."
        )
    places = torch.empty_like(codes)
    places[found[filled]] = filled
    return Places(places[: block * size].view(block, heads, d_key), places[block * size :].view(block, heads, d_value))


def gathered(
    pool: Float[Tensor, "blocks ..."], blocks: Sequence[int], places: Int[Tensor, "block heads numbers"], slots: int
) -> Float[Tensor, "1 heads slots numbers"]:
    """K or V of the first slots of these blocks."""
    return pool[list(blocks)].flatten(1)[:, places].flatten(0, 1)[:slots].transpose(0, 1)[None].cpu()


def put(
    pool: Float[Tensor, "blocks ..."],
    blocks: Sequence[int],
    places: Int[Tensor, "block heads numbers"],
    tensor: Float[Tensor, "1 heads slots numbers"],
) -> None:
    """Write K or V of whole blocks.

    Raises:
        UserError: it has another dtype or shape than the pool keeps.
    """
    block, heads, numbers = places.shape
    if tensor.dtype != pool.dtype or tensor.shape != (1, heads, block * len(blocks), numbers):
        raise UserError(
            f"The cache to be loaded has {tensor.dtype} of shape {tuple(tensor.shape)} in a layer where vLLM keeps "
            f"{pool.dtype} of shape {(1, heads, block * len(blocks), numbers)}; load one of the same model and dtype."
        )
    pages = pool[list(blocks)].flatten(1)
    pages[:, places] = tensor[0].transpose(0, 1).unflatten(0, (-1, block)).to(pool.device)
    pool[list(blocks)] = pages.view(len(blocks), *pool.shape[1:])


def loadable(stored: StoredCache, prompt: Sequence[int], block: int) -> int:
    """How many slots of this prompt a cache stands for.

    Raises:
        UserError: vLLM cannot go on from it as it is.
    """
    ledger, slots = stored.ledger, stored.ledger.slots
    if stored.lacks:
        raise UserError(
            f"The cache to be loaded is not whole ({one_line(ValueError(stored.lacks))}); give one that is."
        )
    if ledger.batch != 1 or not bool(ledger.live.all()):
        raise UserError(
            "vLLM attends to every slot of a prompt, so that a cache with masked slots or several rows cannot be "
            "loaded; load caches of one row, and leave masks to transformers or llama.cpp."
        )
    if not ledger.untouched or ledger.rotated or int(ledger.following[0]) != slots:
        raise UserError(
            "vLLM takes a slot's index for its position, so that a cache with gapped positions, or a gap at its end, "
            "cannot be loaded; load one whose positions count from 0, and which goes on right after its last slot."
        )
    most = (len(prompt) - 1) // block * block
    if slots % block or not 0 < slots <= most:
        raise UserError(
            f"The cache has {slots} slots, and vLLM takes whole blocks of {block} and computes the last token of a "
            f"prompt, here of {len(prompt)} tokens; cut the cache to at most {most} slots, such as with "
            f"cache.rewind(slots={min(most, slots // block * block)})."
        )
    if ledger.tokens[0].tolist() != list(prompt[:slots]):
        raise UserError("The cache to be loaded is of other tokens than the prompt; give the prompt that it is of.")
    return slots


def _specs_of(spec: Any) -> list[Any]:
    """How vLLM keeps the layers of a group: all alike, or each by its name."""
    return list(getattr(spec, "kv_cache_specs", {"all": spec}).values())


@dataclass(frozen=True)
class Transfer:
    """A cache to be written or loaded in a step.

    Attributes:
        file: its path.
        tokens: ids of the slots.
        blocks: which blocks hold them, in order.
    """

    file: str
    tokens: Sequence[int]
    blocks: Sequence[int]


@dataclass
class Transfers:
    """What the scheduler asks of the worker in a step."""

    loads: list[Transfer] = field(default_factory=list[Transfer])
    dumps: list[Transfer] = field(default_factory=list[Transfer])


@dataclass
class _Request:
    tokens: Sequence[int]
    wanted: Mapping[str, str]
    blocks: list[int]
    dumped: bool = False


class KvprobeConnector(_Connector):
    """Dumps caches of chosen requests of vLLM, and loads edited ones; see the module.

    It is for looking into an engine, not for serving: what it refuses ends the engine, with a sentence.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        """As vLLM calls it.

        Raises:
            UserError: no folder is named, or the engine is set up in a way that was not proved.
        """
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._config = vllm_config
        self._block: int = vllm_config.cache_config.block_size
        folder = vllm_config.kv_transfer_config.get_from_extra_config("folder", None)
        if not isinstance(folder, str) or not expanded(folder).is_dir():
            raise UserError(f"{shown(folder)} is no folder; name one in kv_connector_extra_config={{'folder': …}}.")
        self._folder = expanded(folder)
        groups = kv_cache_config.kv_cache_groups
        specs = [spec for group in groups for spec in _specs_of(group.kv_cache_spec)]
        kinds = sorted({type(spec).__name__ for spec in specs} - {_KEPT})
        unproved = {
            "several devices": vllm_config.parallel_config.world_size > 1,
            "speculative decoding": vllm_config.speculative_config is not None,
            "latent attention": vllm_config.model_config.use_mla,
            f"{len(groups)} groups of layers with blocks of their own (states, or windows)": len(groups) != 1,
            # Blocks that left a window are given to other requests before a prompt is read.
            f"{' and '.join(kinds)}, where {_KEPT} keeps every slot of a prompt": bool(kinds),
            f"blocks of other sizes than {self._block} slots": any(spec.block_size != self._block for spec in specs),
        }
        for what in (what for what, here in unproved.items() if here):
            raise UserError(f"The connector does not read caches of vLLM with {what}; run the model without it.")
        self._requests: dict[str, _Request] = {}
        self._to_load: dict[str, int] = {}
        self._pools: Mapping[str, Tensor] = {}
        self._places: dict[str, Places] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens of a prompt need not be computed, because a cache of them is to be loaded."""
        file = self._wanted(request.kv_transfer_params).get("load")
        if file is None:
            return 0, False
        if self._config.cache_config.enable_prefix_caching or num_computed_tokens:
            raise UserError(
                "With prefix caching, vLLM would give an edited cache to later requests, or a clean one to this; load "
                "with enable_prefix_caching=False."
            )
        if request.skip_reading_prefix_cache:
            raise UserError("vLLM loads no cache for a request with prompt_logprobs; ask for logprobs of new tokens.")
        return loadable(open_file(self._folder / file), request.prompt_token_ids, self._block), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note that blocks for a cache to be loaded are there."""
        if num_external_tokens > 0:
            self._to_load[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        """What the worker is to load before this step and to dump after it."""
        step, scheduled, transfers = scheduler_output, scheduler_output.num_scheduled_tokens, Transfers()
        for name in step.finished_req_ids:
            self._requests.pop(name, None)
        for new in step.scheduled_new_reqs:
            extra = getattr(new.sampling_params, "extra_args", None) or {}
            if wanted := self._wanted(extra.get("kv_transfer_params")):
                self._refuse_other(new, wanted)
                self._requests[new.req_id] = _Request(new.prompt_token_ids, wanted, list(new.block_ids[0]))
                self._load(transfers, new.req_id)
                self._dump(transfers, new.req_id, new.num_computed_tokens + scheduled[new.req_id])
        again = step.scheduled_cached_reqs
        for name, blocks, computed in zip(again.req_ids, again.new_block_ids, again.num_computed_tokens, strict=True):
            if name in self._requests:
                more = [] if blocks is None else list(blocks[0])
                if name in again.resumed_req_ids:
                    self._requests[name].blocks = more
                    self._load(transfers, name)
                else:
                    self._requests[name].blocks += more
                self._dump(transfers, name, computed + scheduled[name])
        return transfers

    def _refuse_other(self, new: Any, wanted: Mapping[str, str]) -> None:
        """Refuse a request whose cache is not that of its tokens and the model, or whose dump another would replace."""
        if new.prompt_token_ids is None or new.prompt_embeds is not None or new.mm_features:
            raise UserError("Only prompts of tokens are dumped and loaded; this one holds pictures or vectors.")
        if new.lora_request is not None:
            raise UserError("Caches with an adapter are not those of the model; ask without it, or merge it.")
        for name, other in self._requests.items():
            same = name == new.req_id or list(other.tokens) == list(new.prompt_token_ids)
            if "dump" in wanted and other.wanted.get("dump") == wanted["dump"] and not same:
                raise UserError(f"Two prompts would be dumped to {wanted['dump']}; give each a file of its own.")

    def _load(self, transfers: Transfers, name: str) -> None:
        """Add what is to be loaded for a request that begins, or begins again."""
        request = self._requests[name]
        if "load" not in request.wanted:
            return
        taken = self._to_load.pop(name, 0)
        slots = open_file(file := self._folder / request.wanted["load"]).ledger.slots
        if taken != slots:
            raise UserError(
                f"vLLM takes {taken} of the {slots} slots of {file.name} and would compute the others; load a file "
                "that does not change, with no setting that reads tokens of a cache again."
            )
        transfers.loads.append(Transfer(str(file), request.tokens[:slots], request.blocks[: slots // self._block]))

    def _dump(self, transfers: Transfers, name: str, computed: int) -> None:
        """Add the dump of a request of which so many tokens are computed after this step, if it is read to its end."""
        request = self._requests[name]
        if "dump" in request.wanted and not request.dumped and computed >= len(request.tokens):
            request.dumped = True
            blocks = request.blocks[: -(-len(request.tokens) // self._block)]
            transfers.dumps.append(Transfer(str(self._folder / request.wanted["dump"]), request.tokens, blocks))

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Take the tensors in which vLLM keeps the blocks of each layer."""
        self._pools = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Put caches into their blocks."""
        for load in self._transfers().loads:
            stored = open_file(Path(load.file))
            if len(stored.layers) != len(self._pools):
                raise UserError(f"{load.file} has {len(stored.layers)} layers; the model has {len(self._pools)}.")
            for layer, (name, pool) in zip(stored.layers, self._in_order(), strict=True):
                places = self._places_of(name, pool)
                put(pool, load.blocks, places.keys, part_of(layer, "K"))
                put(pool, load.blocks, places.values, part_of(layer, "V"))

    def wait_for_save(self) -> None:
        """Dump the caches of prompts that were read to their end in this step."""
        for dump in self._transfers().dumps:
            keys: list[Tensor] = []
            values: list[Tensor] = []
            for name, pool in self._in_order():
                places = self._places_of(name, pool)
                keys.append(gathered(pool, dump.blocks, places.keys, len(dump.tokens)))
                values.append(gathered(pool, dump.blocks, places.values, len(dump.tokens)))
            backend = self._layer(next(iter(self._pools))).attn_backend.get_name()
            save_plain(
                KVCache.of(keys, values, Ledger.of(torch.tensor([list(dump.tokens)]))),
                Path(dump.file),
                engine=f"{installed(VLLM) or 'vLLM'} ({backend})",
                model=Path(str(self._config.model_config.model)).name,
                block=self._block,
            )

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: all layers are loaded before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: all layers are dumped after the step."""

    def _transfers(self) -> Transfers:
        return self._get_connector_metadata()

    def _wanted(self, parameters: object) -> Mapping[str, str]:
        if parameters is None:
            return {}
        if not is_mapping(parameters):
            raise UserError(
                f"kv_transfer_params is {shown(parameters)}; expected {{'dump': FILE}} or {{'load': FILE}}."
            )
        for key, file in parameters.items():
            if key not in ("dump", "load"):
                raise UserError(unknown("key of kv_transfer_params", key, ("dump", "load")))
            if not isinstance(file, str) or not _FILE.fullmatch(file) or (key == "dump" and not file.endswith(".json")):
                raise UserError(f"{shown(file)} is no name of a JSON file in the folder of the connector.")
        return parameters

    def _layer(self, name: str) -> Any:
        return self._config.compilation_config.static_forward_context[name]

    def _in_order(self) -> Iterator[tuple[str, Tensor]]:
        """The layers by their number in the model."""
        numbered: dict[int, str] = {}
        for name in self._pools:
            numbers = re.findall(r"(?<=\.)\d+(?=\.)", name)
            if len(numbers) != 1 or getattr(self._layer(name), "kv_sharing_target_layer_name", None) is not None:
                raise UserError(f"The layer {name} shares its cache, or is not one of a list; it is not read.")
            numbered[int(numbers[0])] = name
        if sorted(numbered) != [*range(len(self._pools))]:
            raise UserError("Some layers of this model keep no K and V, or several of them; they are not read.")
        for number in sorted(numbered):
            yield numbered[number], self._pools[numbered[number]]

    def _places_of(self, name: str, pool: Tensor) -> Places:
        if name not in self._places:
            layer, slots = self._layer(name), torch.arange(self._block, device=pool.device)
            if not hasattr(layer.impl, "do_kv_cache_update"):
                raise UserError(f"{type(layer.impl).__name__} has no kernel that writes K and V alone; it is not read.")

            def write(keys: Tensor, values: Tensor) -> None:
                layer.impl.do_kv_cache_update(layer, keys, values, pool, slots)

            d_value = getattr(layer, "head_size_v", layer.head_size)
            sizes = (self._block, layer.num_kv_heads, layer.head_size, d_value)
            self._places[name] = places_in_block(pool, write, *sizes)
        return self._places[name]
