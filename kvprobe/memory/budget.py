"""A model's memory from its config alone, without loading the model."""

import os
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Annotated

from kvprobe.arguments import Within, checked_arguments
from kvprobe.brief import cut
from kvprobe.cache.slots import SlotPlan
from kvprobe.errors import UserError
from kvprobe.memory import hf, vllm
from kvprobe.memory.formats import dtype_of, weight_bytes
from kvprobe.memory.forward import Kernel, Logits
from kvprobe.memory.needs import FARTHEST, EngineName, Needs, require_prompt
from kvprobe.memory.numbers import numbers_named, plain_named
from kvprobe.memory.request import Request
from kvprobe.memory.sources import config_of
from kvprobe.memory.table import lines
from kvprobe.memory.widths import widths_of
from kvprobe.memory.written import plan_of
from kvprobe.units import both, bytes_in

if TYPE_CHECKING:
    from kvprobe.policies import Policy


Size = Annotated[int, Within(1, FARTHEST)]


class Budget(Needs):
    """What a model needs for some conversations; as a text, a table."""

    def __repr__(self) -> str:
        request = self.request
        return (
            f"Budget({cut(self.config.name, 100)!r}, {request.batch} × {request.context} tokens, "
            f"engine={self.engine!r}: {both(self.peak)} at its peak)"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        return "\n".join(lines(self))


@checked_arguments
def budget(
    model: str | os.PathLike[str] | Mapping[str, object],
    *,
    context: Size = 8192,
    new: Annotated[int, Within(0, FARTHEST)] = 0,
    batch: Size = 1,
    source: Annotated[int, Within(0, FARTHEST)] = 0,
    dtype: str | None = None,
    cache_dtype: str | None = None,
    engine: EngineName = "hf",
    policy: "Policy | str | None" = None,
    memory: str | int | None = None,
    weights: str | int | None = None,
    kernel: Kernel | None = None,
    logits: Logits = "last",
    ranks: Size = 1,
    block: Size = vllm.BLOCK,
    batched_tokens: Size = 8192,
) -> Budget:
    """The memory of a model, from its config alone.

    Args:
        model: a name from `kvprobe ls`, the id of a config that ships, a hub id, a folder, a `config.json`, or its
            fields.
        context: tokens of each conversation.
        new: how many of them are generated, one by one; the others are read in one pass.
        batch: conversations at once.
        source: tokens of the other input that cross-attention looks at.
        dtype: of weights and activations; by default the config's.
        cache_dtype: of the cache; by default the same.
        engine: `hf` for the caches of transformers, `vllm` for its blocks, `logical` for what a query may read.
        policy: one of `kv.policies`, or written out: `"SinkWindow(4, 1020)"`.
        memory: that there is, in bytes or as `"24GiB"`.
        weights: bytes of the weights, likewise; by default from the config.
        kernel: of attention in transformers, `sdpa` or `eager`; by default its own choice for this family.
        logits: of the prompt's `last` token, as in generation, or of `all`.
        ranks: GPUs that share the model in vLLM; the budget is that of one.
        block: tokens of a vLLM block.
        batched_tokens: most tokens that a vLLM step reads.

    Raises:
        UserError: the model is unknown or of an unknown family, its config lacks a size or has an impossible one, or
            the engine has no such cache.
    """
    require_prompt(context, new)
    if ranks > 1 and engine != "vllm":
        raise UserError(f"Only vLLM's budget shares a model among ranks; use engine='vllm', or ranks=1 for {engine}.")
    found = config_of(model)
    stated = None if memory is None else bytes_in(memory, "memory")
    given = None if weights is None else bytes_in(weights, "size of the weights")
    plan = SlotPlan() if policy is None else plan_of(policy, context - new)
    cached = None if cache_dtype is None else numbers_named(cache_dtype)
    if cached is not None and engine != "logical":
        (hf if engine == "hf" else vllm).check_format(cached)
    chosen = None if dtype is None else plain_named(dtype)
    # Builds models, and so needs torch and transformers, which a mistake in what is asked for does not.
    from kvprobe.memory.unloaded import text_model, unloaded

    config = text_model(found)
    numbers = chosen or dtype_of(config)
    built = unloaded(config)
    wide = None if engine == "vllm" else built.wide.get(numbers.name)
    stored = weight_bytes(built.weights, config, numbers, wide) if given is None else given
    made = Budget(
        config=config,
        assumed=built.assumed,
        trained_context=built.config.optional_size("max_position_embeddings", "n_positions", "seq_length"),
        layers=built.layers,
        widths=widths_of(built.config, built.layers),
        parameters=built.weights.total,
        active=built.weights.active(built.config),
        weights=-(-stored // ranks),
        request=Request(
            prompt=context - new,
            new=new,
            batch=batch,
            source=source,
            dtype=numbers,
            numbers=cached or numbers,
            plan=plan,
        ),
        engine=engine,
        blocks=vllm.Engine(block=block, ranks=ranks, batched_tokens=batched_tokens),
        kernel=kernel or built.kernel,
        logits=logits,
        memory=stated,
    )
    if engine == "hf":
        hf.check(built.layers, made.request)
    _ = made.cache  # so that what is wrong with it is raised now
    return made
