"""A policy as it is written, `SinkWindow(4, 1020)`, read without torch and without running anything.

Each policy with a budget has a function here that takes what the policy takes, refuses what it refuses, and returns what it
does to the number of slots. Tests hold them to the policies: to their settings, their refusals and their counts.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any

from kvprobe.checks import require_share
from kvprobe.errors import UserError
from kvprobe.memory.slots import Evicts, Plan, Rounds
from kvprobe.names import unknown

LONGEST = 500
"""Characters of a policy that is written out."""

MOST = 1 << 40
"""Slots; no budget is larger."""

Call = tuple[str, Mapping[str, Any]]


def plan_of(policy: Any) -> Plan:
    """The plan of a policy of `kv.policies`, or of one that is written out: `SinkWindow(4, 1020) | TOVA(512)`, `Quantise(4)`.

    Raises:
        UserError: it is no policy, it has no budget without a text, it has a setting that it cannot have, or what is mixed in a
            chain leaves a number of slots that no setting tells.
    """
    if isinstance(policy, str):
        calls = _parsed(policy)
    elif isinstance(getattr(policy, "parts", None), tuple):
        calls = [_seen(part) for part in policy.parts]
    else:
        raise UserError(
            f"{str(policy)[:60]} is no policy; give one of kv.policies, or a text such as 'SinkWindow(4, 1020)'."
        )
    made = [_made(*call) for call in calls]
    evicts = tuple(each for each in made if isinstance(each, Evicts))
    rounds = [each for each in made if isinstance(each, Rounds)]
    if len(rounds) > 1 or (rounds and evicts):
        raise UserError(
            f"{policy} rounds slots and evicts some, and which of them are rounded depends on which went; give one of the two."
        )
    if len(evicts) > 1 and any(each.beta is not None or not each.even for each in evicts):
        raise UserError(
            f"{policy} has budgets that differ by layer or head in a chain, where no setting tells what stays; give one."
        )
    return Plan(str(policy), evicts, rounds[0] if rounds else None)


def _sliding_window(window: Any, *, every: Any = 1) -> Evicts:
    return Evicts(_whole("SlidingWindow", "window", window, 1), every)


def _sink_window(sinks: Any, window: Any, *, every: Any = 1) -> Evicts:
    return Evicts(_whole("SinkWindow", "sinks", sinks, 0) + _whole("SinkWindow", "window", window, 1), every)


def _h2o(budget: Any, recent: Any = None, *, every: Any = 1) -> Evicts:
    slots = _whole("H2O", "budget", budget, 1)
    protected = slots // 2 if recent is None else _whole("H2O", "recent", recent, 0, slots)
    return Evicts(slots, every, protected=protected)


def _tova(budget: Any, *, every: Any = 1) -> Evicts:
    return Evicts(_whole("TOVA", "budget", budget, 1), every)


def _snapkv(budget: Any, window: Any = 16, kernel: Any = 7, *, every: Any = None) -> Evicts:
    protected = _whole("SnapKV", "window", window, 1)
    slots = _whole("SnapKV", "budget", budget, protected)
    if _whole("SnapKV", "kernel", kernel, 1) % 2 == 0:
        raise UserError(f"SnapKV has kernel={kernel}; it must be odd.")
    return Evicts(slots, every, protected=protected)


def _random_eviction(
    budget: Any, seed: Any, per_head: Any = False, sinks: Any = 0, *, every: Any = 1, mode: str = "gapped"
) -> Evicts:
    slots = _whole("RandomEviction", "budget", budget, 1)
    _whole("RandomEviction", "seed", seed, 0)
    protected = _whole("RandomEviction", "sinks", sinks, 0, slots)
    if mode != "gapped" and every is not None:
        raise UserError(f"RandomEviction with mode={mode!r} acts once; give every=None.")
    return Evicts(slots, every, protected=protected)


def _layer_budgets(policy: Any, beta: Any = 20) -> Evicts:
    return replace(_scored("LayerBudgets", policy), beta=_whole("LayerBudgets", "beta", beta, 1))


def _head_budgets(policy: Any, floor: Any = 0.2) -> Evicts:
    require_share("HeadBudgets", "floor", floor)
    return replace(_scored("HeadBudgets", policy), even=False)


def _quantise(
    bits: Any, group: Any = 32, tail: Any = 128, *, every: Any = 1, mode: str = "gapped", provenance: str = "retained"
) -> Rounds:
    if mode != "gapped" or provenance != "retained":
        raise UserError("Quantise moves and recomputes nothing; leave mode and provenance out.")
    return Rounds(
        _whole("Quantise", "bits", bits, 1, 8),
        _whole("Quantise", "group", group, 1),
        _whole("Quantise", "tail", tail, 0),
        every,
    )


_MAKERS: dict[str, Callable[..., Evicts | Rounds]] = {
    "SlidingWindow": _sliding_window,
    "SinkWindow": _sink_window,
    "H2O": _h2o,
    "TOVA": _tova,
    "SnapKV": _snapkv,
    "RandomEviction": _random_eviction,
    "LayerBudgets": _layer_budgets,
    "HeadBudgets": _head_budgets,
    "Quantise": _quantise,
}

PARAMETERS = {
    name: tuple(
        each.name for each in signature(maker).parameters.values() if each.kind is Parameter.POSITIONAL_OR_KEYWORD
    )
    for name, maker in _MAKERS.items()
}
"""What each policy with a budget takes, in order."""

_SCORED = ("H2O", "TOVA", "SnapKV", "RandomEviction")
"""Policies whose budget can be shared out otherwise."""

_COMMON = {"mode": ("gapped", "contiguous", "naive"), "provenance": ("retained", "recomputed")}


def _made(name: str, settings: Mapping[str, Any]) -> Evicts | Rounds:
    """What the policy does to the number of slots."""
    maker, given = _MAKERS[name], dict(settings)
    for setting, known in _COMMON.items():
        if setting in given:
            if given[setting] not in known:
                raise UserError(f"{name}: {unknown(setting, str(given[setting])[:40], known)}")
            if setting not in signature(maker).parameters:
                given.pop(setting)
    if given.get("every") is not None:
        _whole(name, "every", given["every"], 1)
    return maker(**given)


def _scored(name: str, policy: Any) -> Evicts:
    inner, settings = policy if isinstance(policy, tuple) else ("", {})
    if inner not in _SCORED:
        raise UserError(
            f"{name} shares out the budget of {', '.join(_SCORED[:-1])} or {_SCORED[-1]}; give it one of them."
        )
    made = _made(inner, settings)
    assert isinstance(made, Evicts)
    return made


def _seen(policy: Any) -> Call:
    """The name and the settings of a policy object."""
    name = _known(type(policy).__name__)
    settings = {each: getattr(policy, each) for each in PARAMETERS[name]}
    if "policy" in settings:
        return name, {**settings, "policy": _seen(settings["policy"])}
    return name, {**settings, **{each: getattr(policy, each) for each in ("every", *_COMMON)}}


def _parsed(text: str) -> list[Call]:
    """The calls in `A(1, b=2) | B(3)`."""
    if len(text) > LONGEST:
        raise UserError(f"The policy has {len(text):,} characters; it must have at most {LONGEST}.")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise UserError(_unreadable(text)) from error
    members = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
        members.append(tree.right)
        tree = tree.left
    return [_call(each, text) for each in (tree, *reversed(members))]


def _call(node: ast.expr, text: str) -> Call:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise UserError(_unreadable(text))
    name = _known(node.func.id)
    taken = PARAMETERS[name]
    common = () if "policy" in taken else ("every", *_COMMON)
    if len(node.args) > len(taken):
        raise UserError(
            f"{name} takes at most {len(taken)} settings ({', '.join(taken)}), and {len(node.args)} are given."
        )
    settings = dict(zip(taken, node.args, strict=False))
    for keyword in node.keywords:
        setting = str(keyword.arg)
        if setting not in (*taken, *common):
            raise UserError(f"{name}: {unknown('setting', setting, (*taken, *common))}")
        if setting in settings:
            raise UserError(f"{name} is given its {setting} twice.")
        settings[setting] = keyword.value
    for each in signature(_MAKERS[name]).parameters.values():
        if each.default is Parameter.empty and each.name not in settings:
            raise UserError(f"{name} needs its {each.name}, which {_shown(text)} does not give.")
    return name, {setting: _value(setting, value, text) for setting, value in settings.items()}


def _value(setting: str, node: ast.expr, text: str) -> Any:
    if setting == "policy":
        return _call(node, text)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise UserError(_unreadable(text)) from error


def _whole(name: str, setting: str, value: Any, low: int, high: int = MOST) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        expected = f"at least {low}" if high == MOST else f"{low} to {high}"
        raise UserError(f"{name} has {setting}={str(value)[:40]}; it must be a whole number, {expected}.")
    return value


def _known(name: str) -> str:
    if name in ("MaskSpans", "RestartInPlace", "RestartRebuilt", "PruneToolResults"):
        raise UserError(
            f"{name} drops what a text calls by name, so its budget is that of the shorter text: give that as the context."
        )
    if name == "ZeroValues":
        raise UserError("ZeroValues saves no memory: its slots stay, with values of zero.")
    if name not in _MAKERS:
        raise UserError(unknown("policy with a budget", name[:40], _MAKERS))
    return name


def _unreadable(text: str) -> str:
    return f"The policy {_shown(text)} cannot be read; write it as 'SinkWindow(4, 1020)' or as 'Quantise(4)'."


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:59]}…")
