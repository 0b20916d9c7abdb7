"""Recurrent layers of Hugging Face models: they start from a folded state, and what each token writes is noted.

The modelling files call their kernels, and the fused ones in their place, by two names with the same arguments; a
function that takes note stands there, and does nothing else while no cache of kvprobe is read.
"""

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from kvprobe.cache.parts import WRITES, Layer
from kvprobe.cache.recurrence import fold, last_inputs
from kvprobe.errors import UserError
from kvprobe.models.checkpoints import known, remember

KERNELS = (
    ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"),
    ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
)
"""What modelling files call the gated delta rule: for many tokens, and for one."""
_WIDEST = 16
"""Of the short convolutions, in tokens."""


class _Given(NamedTuple):
    """What a kernel was given: `[batch, tokens, heads, …]`."""

    key: Tensor
    value: Tensor
    decay: Tensor
    step: Tensor


_given: ContextVar[list[_Given] | None] = ContextVar("given", default=None)


def recurrent_modules(plain: nn.Module, count: int) -> list[nn.Module]:
    """The modules of a model that call the gated delta rule, of which its config names so many.

    Raises:
        UserError: it has others.
    """
    modules = [
        module
        for module in plain.modules()
        if type(module).__name__.endswith(("GatedDeltaNet", "DeltaAttention")) and _kernels(module)
    ]
    if len(modules) != count:
        raise UserError(
            f"{type(plain).__name__} has {count} layers that keep a state in place of slots, and {len(modules)} with a "
            "recurrence that kvprobe knows (the gated delta rule); use another model."
        )
    return modules


def _kernels(module: nn.Module) -> bool:
    """Whether the modelling file of a module has the gated delta rule."""
    file = sys.modules[type(module).__module__]
    return any(all(hasattr(file, name) for name in names) for names in KERNELS)


@contextmanager
def writes_noted(modules: Iterable[nn.Module]) -> Generator[None]:
    """While this lasts, what the kernels of these modules are given is noted for the `StateLayer` of each."""
    for file in {type(module).__module__: sys.modules[type(module).__module__] for module in modules}.values():
        for name in (name for names in KERNELS for name in names if hasattr(file, name)):
            if not hasattr(kernel := getattr(file, name), "notes"):
                setattr(file, name, _noting(kernel))
    token = _given.set([])
    try:
        yield
    finally:
        _given.reset(token)


def _noting(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def noting(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *rest: Any, **settings: Any) -> Any:
        if (given := _given.get()) is not None:
            given.append(_Given(key, value, g, beta))
        return kernel(query, key, value, g, beta, *rest, **settings)

    noted: Any = wraps(kernel)(noting)
    noted.notes = True  # that it stands in the kernel's place
    return noted


class StateLayer(LinearAttentionLayer):
    """One recurrent layer of a Hugging Face cache; it starts from what was written before, without changing it.

    Attributes:
        written: what the tokens wrote that were read, by the names in `WRITES`.
    """

    def __init__(
        self,
        past: Layer | None = None,
        live: Bool[Tensor, "batch slots"] | None = None,
        padding: Bool[Tensor, "batch slots"] | None = None,
    ) -> None:
        """A layer that starts from these writes.

        Args:
            live: the slots that write; the state decays in the others too, unless they are padding.
        """
        parent: Any = super()
        parent.__init__()
        self.written: dict[str, Float[Tensor, "batch _ slots _"]] = {}
        # So that the inputs of the convolution pass by here when one token is read, too.
        self.record_past = True
        self._inputs: Tensor | None = None
        self._last = torch.empty(0)
        self._past, self._before = past, None
        self._states, self._unhidden = ([], 0) if past is None else ([*known(past)], 0)
        if past is not None:
            if live is None:
                live = torch.ones_like(past["step"][:, 0, :, 0], dtype=torch.bool)
            if padding is not None:
                past = {**past, "decay": past["decay"].masked_fill(padding[:, None, :, None], 0.0)}
            self._before = (past["conv"], live)
            self._unhidden = int(live.all(0).int().cumprod(0).sum())
            self._states = [state for state in self._states if state[0] <= self._unhidden]
            count, start = self._states[-1] if self._states else (0, None)
            rest = {name: tensor[:, :, count:] for name, tensor in past.items()}
            states: Any = self
            states.recurrent_states[0], states.has_previous_state[0] = fold(rest, start, live[:, count:]), True
            states.is_recurrent_states_initialized[0] = True
            self._show_inputs()

    def _show_inputs(self) -> None:
        """Give the last inputs to models that read a single token after them, in place."""
        if self._before is not None:
            inputs = last_inputs(*self._before, _WIDEST)
            states: Any = self
            states.conv_states[0] = nn.functional.pad(inputs, (_WIDEST - inputs.shape[2], 0))

    @property
    def stored(self) -> tuple[Tensor, ...] | None:
        """All writes, those before included, in the order of `WRITES`; None before anything is read."""
        if not self.written:
            return None
        before = () if self._past is None else (self._past,)
        parts = {name: torch.cat([*(part[name] for part in before), self.written[name]], 2) for name in WRITES}
        # Of new tokens that are padding, the ledger says that they are not live.
        slots = parts["decay"].shape[2]
        whole = self._unhidden == slots - self.written["decay"].shape[2]
        remember(parts, [*self._states, *([(slots, self._last)] if whole else [])])
        return tuple(parts.values())

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        self._inputs = conv_states
        if self._before is None or conv_kernel_size is None:
            return conv_states
        return torch.cat([last_inputs(*self._before, conv_kernel_size - 1), conv_states], -1)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        given = _given.get()
        assert given, "the layer was read outside of `writes_noted`"
        states: Any = self
        inputs: Tensor = states.conv_states[0][..., -1:] if self._inputs is None else self._inputs
        key, value, decay, step = (tensor.transpose(1, 2) for tensor in given.pop())
        given.clear()
        decay = decay[..., None] if decay.dim() == 3 else decay
        decay = torch.cat([decay, torch.zeros_like(decay)], -1)
        parts = (key, value, decay, step[..., None], inputs.transpose(1, 2)[:, None])
        self._inputs = None
        self._show_inputs()
        self.written.update(zip(WRITES, parts, strict=True))
        self._last = recurrent_states
        return recurrent_states
