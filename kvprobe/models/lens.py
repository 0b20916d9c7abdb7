"""The hooked lane: TransformerLens hook points over the same weights. Nothing else imports transformer_lens.

TransformerLens replaces modules of the model that it wraps, so it wraps a twin: a copy of the module tree that shares
all parameter tensors with the plain model.
"""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from kvprobe.errors import UserError
from kvprobe.models.adapters import sharing
from kvprobe.models.attending import set_attention
from kvprobe.models.hooks import claimed, unless_bare
from kvprobe.names import one_line
from kvprobe.restoring import restoring
from kvprobe.weights import hold_added

if TYPE_CHECKING:
    from transformer_lens.hook_points import HookPoint

Family = Literal[
    "k_pre", "k", "v", "latent", "rope", "index", "key", "value", "decay", "step", "gain", "conv", "state", "resid_pre",
    "resid_mid", "resid_post", "attn_out", "mlp_out",
]  # fmt: skip
"""What can be captured at a layer: K before k-norm and rotary embedding, K and V as stored (with latent attention the
latent and the rotated key, and with a sparse index its key; in a recurrent layer what tokens write, see
`kvprobe.cache.parts.WRITES`, and the state after them), the residual stream before, between and after attention and
MLP, and what attention and MLP add to it (after post-norms, as in Gemma)."""

HOOKS: dict[Family, str] = {
    "k_pre": "attn.hook_k",
    "k": "attn.hook_rot_k",
    "v": "attn.hook_v",
    "resid_pre": "hook_resid_pre",
    "resid_mid": "hook_resid_mid",
    "resid_post": "hook_resid_post",
    "attn_out": "hook_attn_out",
    "mlp_out": "hook_mlp_out",
}
_LEVEL = -1
"""Level of the hooks that kvprobe adds and removes; TransformerLens counts from 0, so a user's own hooks stay."""
_FAMILIES: dict[str, Family] = {hook: family for family, hook in HOOKS.items()}
STORED: dict[Family, str] = {
    "k": "K", "v": "V", "latent": "latent", "rope": "rope", "index": "index",
    "key": "key", "value": "value", "decay": "decay", "step": "step", "gain": "gain", "conv": "conv",
}  # fmt: skip
"""Families that a cache stores, and the part of a layer that each is."""
PER_HEAD: tuple[Family, ...] = ("k_pre", *STORED, "state")


def hook_name(family: Family, layer: int) -> str:
    """TransformerLens' name of a site, such as `blocks.3.attn.hook_v`."""
    return f"blocks.{layer}.{HOOKS[family]}"


def site_of(name: str) -> tuple[Family, int] | None:
    """The family and layer of TransformerLens' name of a site; None for anything else."""
    match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
    return None if match is None or match[2] not in _FAMILIES else (_FAMILIES[match[2]], int(match[1]))


def sites_of(names: Sequence[str]) -> list[tuple[Family, int]] | None:
    """The sites that TransformerLens' names stand for, each once; None where none of these is the name of a hook.

    Raises:
        UserError: a hook shows nothing that kvprobe reads, or only some of the names are those of hooks.
    """
    hooks = [name for name in names if "hook_" in str(name)]
    if hooks and len(hooks) < len(names):
        other = next(name for name in names if name not in hooks)
        raise UserError(f"A hook's name says its layer and {other!r} does not; give hook names alone, or none.")
    sites: list[tuple[Family, int]] = []
    for name in dict.fromkeys(hooks):
        if (site := site_of(name)) is None:
            raise UserError(
                f"kvprobe has no site at the hook {name!r}; give 'blocks.LAYER.' and one of {', '.join(_FAMILIES)}."
            )
        sites.append(site)
    return sites or None


class Hooked:
    """A TransformerBridge over a twin of the plain model.

    Attributes:
        bridge: the TransformerBridge, with all its hook points.
    """

    def __init__(self, plain: PreTrainedModel) -> None:
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        self._plain = plain
        twin = sharing(plain)
        # Eager attention takes kvprobe's masks unchanged in every architecture.
        set_attention(twin, "eager")
        architecture = type(plain).__name__
        try:
            self.bridge = build_bridge_from_module(twin, architecture, hf_config=twin.config, tokenizer=None)
            hold_added(self.bridge)
            for attention in self.attention_modules:
                attention.register_forward_pre_hook(_cache_named, with_kwargs=True)
        except Exception as error:
            raise UserError(
                f"TransformerLens cannot hook {architecture} ({one_line(error)}); only K and V as stored can be "
                "captured."
            ) from error

    def __call__(self, ids: Tensor, **kwargs: Any) -> Tensor:
        return self.bridge(ids, return_type="logits", **kwargs)

    @property
    def attention_modules(self) -> list[nn.Module]:
        """The modules that receive the attention mask, one per layer."""
        return [block.attn for block in self.bridge.blocks]

    def fires(self, family: Family) -> bool:
        """Whether the hook of this family exists, and shows what its name says, in this architecture."""
        attention = self.bridge.blocks[0].attn
        if family == "k" and not _rotates(attention):
            return False
        return f"blocks.0.{HOOKS[family]}" in self.bridge.hook_dict

    def plain_port(self, family: Family, layer: int) -> tuple[str, Literal["input", "output"]] | None:
        """Where the plain model computes what this hook shows: the path of a submodule, and its input or output.

        It comes from the bridge's own architecture adapter, so it is right wherever TransformerLens is. None where the
        plain model has no such module (K inside a fused QKV projection).
        """
        block = self.bridge.blocks[layer]
        aliases = block.attn.hook_aliases if family in PER_HEAD else block.hook_aliases
        hook = aliases.get(HOOKS[family].removeprefix("attn."))
        if hook is None:
            return None
        *components, end = hook.split(".")
        mapping: Any = self.bridge.adapter.component_mapping
        path, component = f"{mapping['blocks'].name}.{layer}", block
        if family in PER_HEAD:
            component = component.attn
            path = f"{path}.{component.name}"
        for name in components:
            component = getattr(component, name)
            path = f"{path}.{component.name}"
        return path, "input" if end == "hook_in" else "output"

    @contextmanager
    def observing(
        self, families: Sequence[Family], layers: Sequence[int], observe: Callable[[Family, int, Tensor], None]
    ) -> Generator[None]:
        """Call `observe(family, layer, tensor)` for each of these hooks when it fires.

        Raises:
            UserError: a hook does not exist, or did not fire.
        """

        observers = {
            hook_name(family, layer): partial(observe, family, layer) for family in families for layer in layers
        }
        with self._hooked(observers):
            yield

    @contextmanager
    def observing_patterns(self, observe: Callable[[int, Tensor], None]) -> Generator[None]:
        """Call `observe(layer, pattern)` with each layer's attention weights, `[batch, heads, queries, slots]`.

        Raises:
            UserError: a hook does not exist, or did not fire.
        """

        layers = range(len(self.bridge.blocks))
        with self._hooked({f"blocks.{layer}.attn.hook_pattern": partial(observe, layer) for layer in layers}):
            yield

    @contextmanager
    def _hooked(self, observers: Mapping[str, Callable[[Tensor], None]]) -> Generator[None]:
        """While this lasts, these hook points call their observers; a hook that never fires is an error."""
        fired: set[str] = set()

        def hook_of(name: str) -> Callable[..., None]:
            def hook_function(tensor: Tensor, hook: object) -> None:
                fired.add(name)
                observers[name](tensor)

            return hook_function

        for name in observers:
            if name not in self.bridge.hook_dict:
                raise UserError(f"TransformerLens has no hook {name} for this model; choose another.")
        points: dict[str, HookPoint] = {name: self.bridge.hook_dict[name] for name in observers}

        hooks_of: dict[str, Any] = {name: vars(point)["_forward_hooks"] for name, point in points.items()}
        before = {name: set(hooks) for name, hooks in hooks_of.items()}

        def remove() -> None:
            for name, point in points.items():
                point.remove_hooks(level=_LEVEL)
                for number in set(hooks_of[name]) - before[name]:  # of one that was being added
                    hooks_of[name].pop(number)

        with claimed(self._plain), restoring(remove):
            for name, point in points.items():
                # add_hook on the point itself: run_with_hooks costs several forward passes on a small model.
                point.add_hook(unless_bare(hook_of(name)), level=_LEVEL)
            yield
        if silent := set(observers) - fired:
            raise UserError(
                f"TransformerLens did not reach what was asked for: {', '.join(sorted(silent))} never fired; leave it "
                "out, or use lane='plain'."
            )


def _cache_named(module: nn.Module, args: object, kwargs: dict[str, object]) -> tuple[object, dict[str, object]]:
    """Give an attention bridge its cache by the name at which it looks: transformers calls it `cache` from 5.24 on, and
    TransformerLens up to 4.3 would attend as if there were none."""
    return args, {"past_key_values": kwargs["cache"], **kwargs} if "cache" in kwargs else kwargs


def _rotates(attention: nn.Module) -> bool:
    """Whether this attention bridge fires `hook_rot_k` (GPT-2 has no rotary embedding; NeoX's is fused)."""
    from transformer_lens.model_bridge.generalized_components.position_embeddings_attention import (
        PositionEmbeddingsAttentionBridge,
    )

    return isinstance(attention, PositionEmbeddingsAttentionBridge)
