"""What vLLM (V1 engine, 0.33) reserves for conversations: whole blocks, in groups of layers that share one pool.

Layers of one kind form groups of equal size, and all blocks are as large as the largest: a model with 10 full and 52
sliding layers has groups of 10, the last of them partly empty. A sliding layer is counted with its window and the
tokens in flight, since they are written before older blocks are freed. Sources: `v1/kv_cache_interface.py`,
`v1/core/kv_cache_planning.py`, `platforms/interface.py` and `model_executor/layers/mamba/mamba_utils.py` of vLLM
0.33.0. kvprobe's tests do not run vLLM; they compare with the worked examples in its source.
"""

from dataclasses import dataclass

from kvprobe.errors import UserError
from kvprobe.memory.caches import AttentionStore, LayerStore, State
from kvprobe.memory.numbers import Numbers
from kvprobe.memory.request import Request

BLOCK = 16
"""Tokens in a block, unless a hybrid model makes it larger."""

UTILISATION = 0.92
"""Share of a GPU's memory that vLLM uses by default."""


@dataclass(frozen=True)
class Engine:
    """How vLLM is run.

    Attributes:
        block: tokens in a block.
        ranks: GPUs that share a model by tensor parallelism; a budget is that of one of them.
        batched_tokens: `max_num_batched_tokens`, the most that one step reads.
        steps: steps in flight at once; 2 with asynchronous scheduling, which is the default.
    """

    block: int = BLOCK
    ranks: int = 1
    batched_tokens: int = 8192
    steps: int = 2


@dataclass(frozen=True)
class Spec:
    """What one layer needs of the pool: `page` bytes in each of `pages` blocks for one conversation."""

    key: tuple[object, ...]
    page: int
    pages: int


@dataclass(frozen=True)
class Reserved:
    """Blocks for one conversation.

    Attributes:
        block: tokens in a block.
        block_bytes: of one block, which all layers of a group share.
        blocks: of one conversation.
        pages: bytes of each layer's pages; the rest of `blocks × block_bytes` is padding.
    """

    block: int
    block_bytes: int
    blocks: int
    pages: list[int]

    @property
    def bytes(self) -> int:
        return self.blocks * self.block_bytes


def reserved(layers: tuple[LayerStore, ...], request: Request, engine: Engine) -> Reserved:
    """The blocks that vLLM counts for one conversation of this length, on one rank.

    Raises:
        UserError: vLLM does not have such a cache.
    """
    _refuse(layers, request, engine)
    block, page = _block(layers, request, engine)
    pages = [0] * len(layers)
    specs: list[Spec] = []
    for number, layer in enumerate(layers):
        for part in (layer.attention, layer.state):
            if part is not None:
                spec = _spec(part, request, engine, block, page)
                specs.append(spec)
                pages[number] += spec.page * spec.pages
    if not specs:
        return Reserved(block, 0, 0, pages)
    kinds: dict[tuple[object, ...], list[Spec]] = {}
    for spec in specs:
        kinds.setdefault(spec.key, []).append(spec)
    counts = sorted(len(members) for members in kinds.values())
    # vLLM prefers a little padding to many groups.
    size = counts[-1] if counts[-1] < 1.5 * counts[0] else counts[0]
    groups = [(-(-len(members) // size), members) for members in kinds.values()]
    longest = max(-(-len(members) // number) for number, members in groups)
    return Reserved(
        block,
        block_bytes=longest * max(spec.page for spec in specs),
        blocks=sum(number * members[0].pages for number, members in groups),
        pages=pages,
    )


def _block(layers: tuple[LayerStore, ...], request: Request, engine: Engine) -> tuple[int, int | None]:
    """Tokens in a block, and, for a model with attention and states, the bytes to which their pages are padded."""
    states = [_state_bytes(layer.state, request, engine) for layer in layers if layer.state is not None]
    attentions = [_token_bytes(layer.attention, request, engine) for layer in layers if layer.attention is not None]
    if not states or not attentions:
        return engine.block, None
    token = max(attentions)
    block = engine.block * -(-max(states) // (engine.block * token))
    block = max(block, engine.block)
    return block, block * token


def _spec(part: AttentionStore | State, request: Request, engine: Engine, block: int, page: int | None) -> Spec:
    if isinstance(part, State):
        # With prefix caching, the default of hybrid models, there are two states: the current one and the last cached
        # one.
        return Spec(("state",), page or _state_bytes(part, request, engine), 2 if page else 1)
    attention = part
    tokens = request.source if attention.crosses else request.context
    in_flight = engine.steps * engine.batched_tokens
    slack = 0
    if attention.reach is not None and attention.chunked:
        tokens = min(attention.reach + in_flight, tokens)
    elif attention.reach is not None:
        tokens = min(attention.reach - 1 + in_flight, tokens)
        slack = 1  # a window need not begin where a block does
    key = (attention.reach, attention.chunked, attention.crosses)
    page = block * _token_bytes(attention, request, engine) if page is None else page
    return Spec(key, page, -(-tokens // block) + slack)


def _token_bytes(attention: AttentionStore, request: Request, engine: Engine) -> int:
    """Bytes of one token in one layer, on one rank."""
    name = request.numbers.name
    if attention.latent:
        if name == "fp8_ds_mla":
            # 512 numbers of fp8, four scales, and the rotary part in bfloat16.
            return 656 + _index_bytes(attention)
        return request.numbers.bytes(attention.d_key + attention.d_value) + _index_bytes(attention)
    heads = max(1, attention.kv_heads // engine.ranks)
    return heads * sum(_vector_bytes(d, name, request) for d in (attention.d_key, attention.d_value))


def _index_bytes(attention: AttentionStore) -> int:
    """Bytes of one key of a sparse-attention index: fp8 numbers, and a scale for each 128."""
    return attention.d_index + attention.d_index // 128 * 4


def _vector_bytes(d: int, name: str, request: Request) -> int:
    if name == "nvfp4":
        return d // 2 + d // 16
    scale = 4 if name.endswith("per_token_head") else 0
    return d * request.numbers.bits // 8 + scale


def _state_bytes(state: State, request: Request, engine: Engine) -> int:
    number = request.dtype.bytes(1)
    recurrent = {"float32": 4, "bfloat16": 2, "float16": 2}.get(state.dtype or "", number)
    return (state.channels * (state.kernel - 1) * number + state.recurrent * recurrent) // engine.ranks


def check_format(numbers: Numbers) -> None:
    """Refuse what vLLM does not store.

    Raises:
        UserError: it has no such cache.
    """
    if "vllm" not in numbers.engines:
        raise UserError(
            f"vLLM has no cache of {numbers.name}; use a float, fp8, int8_per_token_head, int4_per_token_head or nvfp4."
        )


def _refuse(layers: tuple[LayerStore, ...], request: Request, engine: Engine) -> None:
    name = request.numbers.name
    check_format(request.numbers)
    if request.plan.evicts or request.plan.rounds is not None:
        raise UserError(f"vLLM has no policy like {request.plan.name}; use engine='logical' or 'hf'.")
    for layer in layers:
        attention, state = layer.attention, layer.state
        if state is not None and (state.channels % engine.ranks or state.recurrent % engine.ranks):
            raise UserError(
                f"The states of {state} cannot be divided among {engine.ranks} ranks; use a divisor of their sizes."
            )
        if attention is None:
            continue
        if attention.latent and name not in ("float32", "bfloat16", "float16", "fp8", "fp8_ds_mla"):
            raise UserError(f"vLLM stores latent attention as floats, fp8 or fp8_ds_mla, not as {name}.")
        if name == "fp8_ds_mla" and (attention.d_key, attention.d_value) != (512, 64):
            raise UserError("The format fp8_ds_mla is for latent attention of 512 + 64 numbers; use fp8.")
        whole = attention.kv_heads % engine.ranks == 0 or engine.ranks % attention.kv_heads == 0
        if not attention.latent and (attention.heads % engine.ranks or not whole):
            raise UserError(
                f"{attention.heads} query heads and {attention.kv_heads} KV heads cannot be divided among "
                f"{engine.ranks} ranks; use a divisor of both."
            )
