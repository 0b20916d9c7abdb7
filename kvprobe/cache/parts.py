"""What a layer stores of each slot, part by part.

K and V of each KV head; or, with latent attention (DeepSeek), one latent of which all heads compute their K and V, and
one rotated key that all heads share: content and position, apart. Where a sparse index chooses the slots that a query
attends to (DeepSeek V3.2, GLM-5), one more key, by which it finds the slot; or, in a recurrent layer, what the token
wrote into its state (Qwen3-Next, Granite 4; see `kvprobe.cache.recurrence`). A layer may both attend and keep a state
(Falcon-H1), or do neither and store nothing (Nemotron-H).
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from kvprobe.errors import UserError

KV: tuple[Literal["K"], Literal["V"]] = ("K", "V")
LATENT: tuple[Literal["latent"], Literal["rope"]] = ("latent", "rope")
INDEX: Literal["index"] = "index"
"""The parts of a layer, in the order in which transformers' cache holds them."""
WRITES = ("key", "value", "decay", "step", "gain", "conv")
"""The parts of recurrent layers: the key that a token writes at (not normalised); the value that it writes; how far the
state decays before it, and after it where slots were evicted there (logarithms); how far what the key finds in the
state goes towards the value, or how much of the value is added; and what the short convolution was given."""
DELTA = ("key", "value", "decay", "step", "conv")
"""The gated delta rule: Qwen3-Next."""
ADDED = ("key", "value", "decay", "gain", "conv")
"""Values are added: Mamba-2, where key, value and gain are called B, x and Δ, and the decay is A Δ."""
CONVOLVED = ("conv",)
"""A short convolution alone: LFM2."""
ROTATED = ("K", "rope", INDEX)
"""The parts that are rotated by position."""
PARTS = (*KV, *LATENT, INDEX, *WRITES)
"""All of them; a layer has its own in this order."""
LAYERS = (KV, LATENT, (*LATENT, INDEX), DELTA, ADDED, CONVOLVED, (*KV, *ADDED), ())
"""The parts that a layer may have."""


class PartSize(NamedTuple):
    """The size of a part of what a layer stores of one slot."""

    name: str
    heads: int
    numbers: int

    def head_bytes(self, number_bytes: int) -> int:
        """Bytes of one head's numbers, where those of the cache take so many; a decay is always a float32."""
        return self.numbers * (4 if self.name == "decay" else number_bytes)


Shape = tuple[tuple[PartSize, ...], ...]
"""The parts of each layer."""


def recurrent(layer: Iterable[str]) -> bool:
    """Whether a layer of these parts keeps a state, of which it stores what each token wrote."""
    return "conv" in layer


def attends(layer: Iterable[str]) -> bool:
    """Whether a layer of these parts attends to slots."""
    return any(name not in WRITES for name in layer)


def heads_apart(shape: Shape) -> int:
    """KV heads of each layer that may keep slots of their own; 1 where layers differ in them, or keep states."""
    heads = {parts[0].heads for parts in shape if parts}
    states = any(part.name in WRITES for parts in shape for part in parts)
    return 1 if states or len(heads) > 1 else heads.pop()


def refuse_other_parts(names: Iterable[str]) -> None:
    """Refuse parts that are not those of any layer."""
    if (given := tuple(names)) not in LAYERS:
        known = ", or ".join(" and ".join(parts) for parts in LAYERS if parts)
        raise UserError(f"A layer stores {known}; got {', '.join(given) or 'nothing'}.")


def described(shape: Shape, sizes: bool = True) -> str:
    """What layers store, in a few words."""

    def words(parts: tuple[PartSize, ...]) -> str:
        part = {part.name: part for part in parts}
        told: list[str] = []
        if "K" in part:
            widths = " and ".join(map(str, dict.fromkeys(part[name].numbers for name in KV)))
            told.append(f"{part['K'].heads} KV heads" + (f" of {widths}" if sizes else ""))
        told += [f"{name} {part[name].numbers}" for name in (*LATENT, INDEX) if name in part]
        if "value" in part:
            size = f" of {part['key'].numbers} × {part['value'].numbers}" if sizes else ""
            told.append(f"writes to a state of {part['value'].heads} heads{size}")
        elif "conv" in part:
            told.append("inputs of a convolution" + (f" of {part['conv'].numbers} numbers" if sizes else ""))
        return " and ".join(told)

    return " or ".join(dict.fromkeys(told for told in map(words, shape) if told))
