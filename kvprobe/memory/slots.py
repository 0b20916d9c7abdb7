"""How many tokens of a conversation each layer still holds under a policy, told without a model.

A policy's budget says how many slots stay, whatever it is that stays: counts follow from the policy's own settings. A
policy that drops what a text calls by name (`MaskSpans`, `PruneToolResults`) has no budget without the text.
"""

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvprobe.suggest import unknown

SCALE_BYTES = 4
"""Of a quantisation group: a scale and a minimum in float16."""


def code_bytes(numbers: int, bits: int) -> int:
    """Whole bytes that the codes of these numbers take."""
    return -(-numbers * bits // 8)


@dataclass(frozen=True)
class Rounds:
    """Rounds all but the last `tail` slots, in whole groups of `group`, to `bits` a number (`Quantise`)."""

    bits: int
    group: int = 32
    tail: int = 128
    every: int | None = 1

    def coarse(self, prompt: int, new: int) -> int:
        """Slots that are rounded after so many generated tokens."""
        since = new if self.every is None else new % self.every
        return max(0, prompt + new - since - self.tail) // self.group * self.group

    def slot_bytes(self, d_key: int, d_value: int) -> int:
        """Of one rounded slot of one head, less what its group of keys shares."""
        groups = d_value // min(self.group, d_value)
        return code_bytes(d_key, self.bits) + code_bytes(d_value, self.bits) + groups * SCALE_BYTES

    def group_bytes(self, d_key: int) -> int:
        """Of the scales that one group of keys shares in one head: a pair for each channel."""
        return d_key * SCALE_BYTES


@dataclass(frozen=True)
class Evicts:
    """Keeps at most `budget` slots a head, acting every so many generated tokens; None for once, after the prompt.

    Attributes:
        slope: of budgets that fall from the first layer to the last at the same mean (PyramidKV).
    """

    budget: int
    every: int | None = 1
    slope: float = 0.0

    def kept(self, prompt: int, new: int, layer: int, layers: int) -> int:
        """Slots that a head of this layer holds after so many generated tokens."""
        since = new if self.every is None else new % self.every
        acted_on = prompt + new - since
        budget = layer_counts(layers, self.budget, acted_on, self.slope)[layer] if self.slope else self.budget
        return min(acted_on, budget) + since


def layer_counts(layers: int, budget: int, most: int, slope: float) -> list[int]:
    """Slots for each layer, falling linearly from (1 + slope) to (1 − slope) times the budget; they add up to `layers` times
    the budget. Where there are only `most` slots, the slope is less."""
    slope = max(0.0, min(slope, most / budget - 1))
    step = 2 * slope / (layers - 1) if layers > 1 else 0.0
    ends = [0]
    total = 0.0
    for layer in range(layers):
        total += (1 + slope - step * layer) * budget if layers > 1 else budget
        ends.append(round(total))
    return [end - start for start, end in pairwise(ends)]


@dataclass(frozen=True)
class Plan:
    """What a policy does to the number of slots.

    Attributes:
        name: as one would write it.
        evicts: each eviction; the tightest binds.
        rounds: the rounding, if there is one.
    """

    name: str = "none"
    evicts: tuple[Evicts, ...] = ()
    rounds: Rounds | None = None

    def kept(self, prompt: int, new: int, layer: int, layers: int) -> int:
        """Slots that a head of this layer holds after so many generated tokens."""
        return min((each.kept(prompt, new, layer, layers) for each in self.evicts), default=prompt + new)


def plan_of(policy: Any) -> Plan:
    """The plan of a policy of `kv.policies`, or of one that is written out: `SinkWindow(4, 1020)`, `Quantise(4)`.

    Raises:
        ValueError: it is not a policy, it has no budget without a text, or roundings and evictions are mixed.
    """
    calls = _parsed(policy) if isinstance(policy, str) else [_seen(part) for part in policy.parts]
    evicts = [_evicts(name, settings) for name, settings in calls if name != "Quantise"]
    rounds = [_rounds(settings) for name, settings in calls if name == "Quantise"]
    if len(rounds) > 1 or (rounds and evicts):
        raise ValueError(
            f"{policy} rounds slots and evicts some, and which of them are rounded depends on which went; give one of the two."
        )
    return Plan(str(policy), tuple(evicts), rounds[0] if rounds else None)


_PARAMETERS: dict[str, tuple[str, ...]] = {
    "SlidingWindow": ("window",),
    "SinkWindow": ("sinks", "window"),
    "H2O": ("budget", "recent"),
    "TOVA": ("budget",),
    "SnapKV": ("budget", "window", "kernel"),
    "RandomEviction": ("budget", "seed", "per_head", "sinks"),
    "LayerBudgets": ("policy", "slope"),
    "HeadBudgets": ("policy", "floor"),
    "Quantise": ("bits", "group", "tail"),
}
"""What each policy with a budget takes, in order; a test holds them to the policies themselves."""

_KEYWORDS = ("law", "provenance", "every")

_DEFAULTS: dict[str, dict[str, Any]] = {"SnapKV": {"every": None}, "LayerBudgets": {"slope": 0.5}}

Call = tuple[str, Mapping[str, Any]]


def _rounds(settings: Mapping[str, Any]) -> Rounds:
    return Rounds(**{name: settings[name] for name in ("bits", "group", "tail", "every") if name in settings})


def _evicts(name: str, settings: Mapping[str, Any]) -> Evicts:
    settings = {**_DEFAULTS.get(name, {}), **settings}
    if name in ("LayerBudgets", "HeadBudgets"):
        inner = _evicts(*settings["policy"])
        slope = float(settings["slope"]) if name == "LayerBudgets" else 0.0
        return Evicts(inner.budget, inner.every, slope)
    budget = settings["budget"] if "budget" in settings else settings.get("sinks", 0) + settings["window"]
    return Evicts(_whole(name, "budget", budget, 1), settings.get("every", 1))


def _seen(policy: Any) -> Call:
    """The name and the settings of a policy object."""
    name = _known(type(policy).__name__)
    settings = {each: getattr(policy, each) for each in (*_PARAMETERS[name], "every")}
    if "policy" in settings:
        settings["policy"] = _seen(settings["policy"])
    return name, settings


def _parsed(text: str) -> list[Call]:
    """The calls in `A(1, b=2) | B(3)`. The text is read, and nothing in it is run."""
    try:
        tree = ast.parse(text[:500].strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise ValueError(_unreadable(text)) from error
    members = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
        members.append(tree.right)
        tree = tree.left
    return [_call(each, text) for each in (tree, *reversed(members))]


def _call(node: ast.expr, text: str) -> Call:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(_unreadable(text))
    name = _known(node.func.id)
    taken = _PARAMETERS[name]
    if len(node.args) > len(taken):
        raise ValueError(
            f"{name} takes at most {len(taken)} settings ({', '.join(taken)}); {text!r} gives {len(node.args)}."
        )
    settings = dict(zip(taken, node.args, strict=False))
    for keyword in node.keywords:
        if keyword.arg not in (*taken, *_KEYWORDS):
            raise ValueError(f"In {text!r}: {unknown('setting', str(keyword.arg), (*taken, *_KEYWORDS))}")
        settings[keyword.arg] = keyword.value
    values = {each: _value(name, each, value, text) for each, value in settings.items()}
    required = {"SinkWindow": taken, "RandomEviction": ("budget", "seed")}.get(name, taken[:1])
    for each in required:
        if each not in values:
            raise ValueError(f"{name} needs its {each}, as in {_EXAMPLES[name]}; {text!r} does not give it.")
    return name, values


def _value(name: str, setting: str, node: ast.expr, text: str) -> Any:
    if setting == "policy":
        return _call(node, text)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError(_unreadable(text)) from error
    if setting in ("slope", "floor"):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"{name} has {setting}={value}; it must be 0 to 1.")
        return value
    if setting in ("law", "provenance", "per_head") or value is None:
        return value
    low = 0 if setting in ("sinks", "tail", "seed", "recent") else 1
    return _whole(name, setting, value, low, 8 if setting == "bits" else None)


def _whole(name: str, setting: str, value: Any, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        expected = f"at least {low}" if high is None else f"{low} to {high}"
        raise ValueError(f"{name} has {setting}={value}; it must be a whole number, {expected}.")
    return value


def _known(name: str) -> str:
    if name in ("MaskSpans", "RestartInPlace", "RestartRebuilt", "PruneToolResults"):
        raise ValueError(
            f"{name} drops what a text calls by name, so its budget is that of the shorter text: give that as the context."
        )
    if name == "ZeroValues":
        raise ValueError("ZeroValues saves no memory: its slots stay, with values of zero.")
    if name not in _PARAMETERS:
        raise ValueError(unknown("policy with a budget", name, _PARAMETERS))
    return name


_EXAMPLES = {
    "SlidingWindow": "SlidingWindow(1024)",
    "SinkWindow": "SinkWindow(4, 1020)",
    "H2O": "H2O(1024)",
    "TOVA": "TOVA(1024)",
    "SnapKV": "SnapKV(1024)",
    "RandomEviction": "RandomEviction(1024, 0)",
    "LayerBudgets": "LayerBudgets(SnapKV(1024))",
    "HeadBudgets": "HeadBudgets(SnapKV(1024))",
    "Quantise": "Quantise(4)",
}


def _unreadable(text: str) -> str:
    return f"The policy {text[:60]!r} cannot be read; write it as {' or as '.join(map(repr, ('SinkWindow(4, 1020)', 'Quantise(4)')))}."
