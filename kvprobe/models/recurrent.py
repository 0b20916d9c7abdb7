"""Recurrent layers of Hugging Face models: they start from a folded state, and what each token writes is noted.

The modelling files call their kernels, and the fused ones in their place, by names with the same arguments; a function
that takes note stands there, and does nothing else while no cache of kvprobe is read.
"""

import inspect
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionLayer

from kvprobe.cache.entries import entries
from kvprobe.cache.layer import Layer
from kvprobe.cache.parts import WRITES
from kvprobe.cache.recurrence import fold, last_inputs
from kvprobe.errors import UserError
from kvprobe.models.checkpoints import State, known, remember

Given = Mapping[str, Any]
"""What a kernel was given, by the names of its arguments."""
Noted = dict[str, Float[Tensor, "batch tokens heads _"]]


def _delta(given: Given) -> Noted:
    """What tokens write by the gated delta rule."""
    decay = given["g"] if given["g"].dim() == 4 else given["g"][..., None]
    return {"key": given["key"], "value": given["value"], "decay": decay.float(), "step": given["beta"][..., None]}


def _scan(given: Given) -> Noted:
    """What tokens write in Mamba-2."""
    gain = given["dt"] if given["dt_bias"] is None else given["dt"] + given["dt_bias"].to(given["dt"].dtype)
    gain = nn.functional.softplus(gain) if given["dt_softplus"] else gain
    gain = gain.clamp(*given.get("dt_limit", (0.0, torch.inf)))[..., None]
    decay = given["A"].float()[:, None] * gain.float()
    return {"key": given["B"], "value": given["hidden_states"], "decay": decay, "gain": gain}


def _one_scanned(given: Given) -> Noted:
    """The same of the kernel for one token, which is given what all numbers of a head share as many times."""
    alike = {"dt": given["dt"][:, None, :, 0], "dt_bias": given["dt_bias"][:, 0], "A": given["A"][:, 0, 0]}
    return _scan({**given, **alike, "B": given["B"][:, None], "hidden_states": given["hidden_states"][:, None]})


KERNELS: dict[str, Callable[[Given], Noted]] = {
    "torch_chunk_gated_delta_rule": _delta,
    "torch_recurrent_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "recurrent_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _scan,
    "mamba2_selective_state_update": _one_scanned,
}
"""What modelling files call their kernels, and what tokens write there."""
_WIDEST = 16
"""Of the short convolutions, in tokens."""
_given: ContextVar[list[Noted] | None] = ContextVar("given", default=None)


def recurrent_modules(plain: nn.Module, count: int) -> list[nn.Module]:
    """The modules of a model that keep a state by a known rule, of which its config names so many.

    Raises:
        UserError: it has others.
    """
    modules = known_modules(plain)
    if len(modules) != count:
        raise UserError(
            f"{type(plain).__name__} has {count} layers that keep a state, and {len(modules)} with a recurrence that "
            "kvprobe knows (the gated delta rule, Mamba-2, a short convolution); use another model."
        )
    return modules


def known_modules(plain: nn.Module) -> list[nn.Module]:
    """The modules of a model that keep a state by a known rule."""
    return [module for module in plain.modules() if _known(module)]


def _known(module: nn.Module) -> bool:
    """Whether a module keeps a state by a known rule, as its name and its modelling file tell."""
    name, file = type(module).__name__, sys.modules[type(module).__module__]
    if name.endswith("ShortConv"):
        return True
    mixes = name.endswith(("GatedDeltaNet", "DeltaAttention", "Mixer", "MambaLayer"))
    return mixes and any(hasattr(file, kernel) for kernel in KERNELS)


@contextmanager
def writes_noted(modules: Iterable[nn.Module]) -> Generator[list[Noted]]:
    """While this lasts, what the kernels of these modules are given is noted, for the `StateLayer` of each to take."""
    for file in {type(module).__module__: sys.modules[type(module).__module__] for module in modules}.values():
        for name, noted in KERNELS.items():
            if hasattr(file, name) and not hasattr(kernel := getattr(file, name), "notes"):
                setattr(file, name, _noting(kernel, noted))
    given: list[Noted] = []
    token = _given.set(given)
    try:
        yield given
    finally:
        _given.reset(token)


def _noting(kernel: Callable[..., Any], noted: Callable[[Given], Noted]) -> Callable[..., Any]:
    signature = inspect.signature(kernel)

    def noting(*arguments: Any, **settings: Any) -> Any:
        given = _given.get()
        if given is None:
            return kernel(*arguments, **settings)
        bound = signature.bind(*arguments, **settings)
        bound.apply_defaults()
        given.append(noted(bound.arguments))
        computed = kernel(*arguments, **settings)
        # What the kernel of Mamba-2 for one token writes to in place, the model does not hand on.
        if (layer := getattr(bound.arguments.get("state"), "layer", None)) is not None:
            layer().update_recurrent_state(bound.arguments["state"])
        return computed

    replaced: Any = wraps(kernel)(noting)
    replaced.notes = True  # that it stands in the kernel's place
    return replaced


class StateLayer(LinearAttentionLayer):
    """One recurrent layer of a Hugging Face cache; it starts from what was written before, without changing it.

    Attributes:
        written: what the tokens wrote that were read, by the names in `WRITES`.
        state: the state after them, as `fold` gives it; empty where there is none.
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
        self.state = torch.empty(0, 0, 0, 0)
        self._start: Tensor | None = None
        self._past, self._before = past, None
        self._states: list[State] = []
        self._unhidden = 0
        if past is not None:
            states: Any = self
            states.has_previous_state[0] = True
            live = torch.ones_like(past["conv"][:, 0, :, 0], dtype=torch.bool) if live is None else live
            self._before = (past["conv"], live)
            self._show_inputs()
            if "decay" in past:
                state: Any = self._folded(past, live, padding)
                # Mamba-2 has it so, and writes to it in place.
                self._begin(state.transpose(2, 3).clone() if "gain" in past else state, "gain" in past)

    def _folded(
        self, past: Layer, live: Bool[Tensor, "batch slots"], padding: Bool[Tensor, "batch slots"] | None
    ) -> Tensor:
        """The state after these writes."""
        self._unhidden = int(live.all(0).int().cumprod(0).sum())
        self._states = [state for state in known(past) if state[0] <= self._unhidden]
        if padding is not None:
            past = {**past, "decay": past["decay"].masked_fill(padding[:, None, :, None], 0.0)}
        count, start = self._states[-1] if self._states else (0, None)
        self._start = fold({name: tensor[:, :, count:] for name, tensor in past.items()}, start, live[:, count:])
        return self._start

    def _begin(self, state: Any, in_place: bool) -> None:
        """Start from a state as the model has it.

        Args:
            in_place: whether the model writes to it.
        """
        states: Any = self
        if in_place:
            state.layer = weakref.ref(self)
        states.recurrent_states[0] = state
        states.is_recurrent_states_initialized[0] = True

    def of_rows(self, other: "StateLayer | None", which: Int[Tensor, "rows"]) -> "StateLayer":
        """A layer of which each row starts as one of these does: of this layer's rows, and then of the other's."""
        layers: list[Any] = [self] if other is None else [self, other]
        inputs: Tensor = torch.cat([layer.conv_states[0] for layer in layers])[which]
        rows = StateLayer({"conv": inputs.transpose(1, 2)[:, None]})
        if layers[0].is_recurrent_states_initialized[0]:
            states: list[Any] = [layer.recurrent_states[0] for layer in layers]
            rows._begin(torch.cat(states)[which], hasattr(states[0], "layer"))
        return rows

    @property
    def folded(self) -> Float[Tensor, "batch heads d_key d_value"]:
        """The fold of what was written, where nothing was before."""
        return fold(self.written)

    def states_at(self, slots: Int[Tensor, "batch picked"]) -> Float[Tensor, "batch heads picked numbers"]:
        """The state after each of these of the slots that were read, its numbers in one row."""
        distinct = sorted({*entries(slots.flatten(), int)})
        states, first, state = list[Tensor](), 0, self._start
        for slot in distinct:
            state = fold({name: part[:, :, first : slot + 1] for name, part in self.written.items()}, state)
            states.append(state.flatten(2))
            first = slot + 1
        places = torch.searchsorted(torch.tensor(distinct, device=slots.device), slots)
        every = torch.stack(states, 2)
        return every.gather(2, places[:, None, :, None].expand(-1, every.shape[1], -1, every.shape[3]))

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
        parts = {
            name: torch.cat([*(part[name] for part in before), self.written[name]], 2)
            for name in WRITES
            if name in self.written
        }
        self.remembered(parts)
        return tuple(parts.values())

    def remembered(self, writes: Layer) -> None:
        """Keep the states on the way through these writes, of which the last are those that were read."""
        if "decay" in writes:
            # Of new tokens that are padding, the ledger says that they are not live.
            slots = writes["decay"].shape[2]
            whole = self._unhidden == slots - self.written["decay"].shape[2]
            remember(writes, [*self._states, *([(slots, self.state)] if whole else [])])

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: object
    ) -> Tensor:
        self._inputs = conv_states
        self.written = {"conv": conv_states.transpose(1, 2)[:, None]}
        if self._before is None or conv_kernel_size is None:
            return conv_states
        return torch.cat([last_inputs(*self._before, conv_kernel_size - 1), conv_states], -1)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object) -> Tensor:
        given = _given.get()
        assert given, "the layer was read outside of `writes_noted`"
        states: Any = self
        inputs: Tensor = states.conv_states[0][..., -1:] if self._inputs is None else self._inputs
        noted = {name: tensor.transpose(1, 2) for name, tensor in given.pop().items()}
        given.clear()
        noted["decay"] = torch.cat([noted["decay"], torch.zeros_like(noted["decay"])], -1)
        self.written = {**noted, "conv": inputs.transpose(1, 2)[:, None]}
        self._inputs = None
        self._show_inputs()
        self.state = recurrent_states.transpose(2, 3).clone() if "gain" in noted else recurrent_states
        return recurrent_states
