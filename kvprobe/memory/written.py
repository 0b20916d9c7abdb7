"""What a policy does to the number of slots, from the policy or from its text, `SinkWindow(4, 1020)`."""

import ast
from collections.abc import Mapping
from dataclasses import MISSING, fields
from inspect import isabstract
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from kvprobe.cache.slots import Evicts, Rounds, SlotPlan
from kvprobe.errors import UserError
from kvprobe.extensions import extension, extensions
from kvprobe.names import unknown

if TYPE_CHECKING:
    from kvprobe.policies import Policy

LONGEST = 500
"""Most characters of a policy that is given as text."""

_EXACT = 1 << 53
"""Whole numbers below this are exact as floats."""


def plan_of(policy: "Policy | str") -> SlotPlan:
    """The plan of a policy of `kv.policies`, or of its text: `SinkWindow(4, 1020) | TOVA(512)`, `Quantise(4)`.

    Nothing in a text is run but the policy's own constructor, with literals.

    Raises:
        UserError: it is not a policy, it has a setting that it cannot have, its number of slots depends on a text, or
            it is a chain whose number of slots does not follow from the settings.
    """
    # Policies need torch, which a budget without one does not.
    from kvprobe.policies import Policy

    members = policy_members(policy) if isinstance(policy, str) else policy.parts if isinstance(policy, Policy) else ()
    if not members:
        raise UserError(
            f"{str(policy)[:60]} is not a policy; give one of kv.policies, or a text such as 'SinkWindow(4, 1020)'."
        )
    counts = [member.slot_count for member in members]
    evicts = tuple(count for count in counts if isinstance(count, Evicts))
    rounds = [count for count in counts if isinstance(count, Rounds)]
    if len(rounds) > 1 or (rounds and evicts):
        raise UserError(
            f"{policy} both rounds and evicts slots, so the number of rounded slots depends on which are evicted; "
            "give one of the two."
        )
    if len(evicts) > 1 and any(count.beta is not None or not count.even for count in evicts):
        raise UserError(
            f"{policy} has budgets that differ by layer or head in a chain, so its settings do not determine the "
            "number of retained slots; give one policy."
        )
    return SlotPlan(str(policy), evicts, rounds[0] if rounds else None)


def policy_members(text: str) -> "list[Policy]":
    """The policies of `A(1, b=2) | B(3)`.

    Raises:
        UserError: the text is not of this form, or a policy refuses its settings.
    """
    if len(text) > LONGEST:
        raise UserError(f"The policy has {len(text):,} characters; it must have at most {LONGEST}.")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise UserError(_unreadable(text)) from error
    members: list[ast.expr] = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
        members.append(tree.right)
        tree = tree.left
    return [_policy(member, text) for member in (tree, *reversed(members))]


def kinds() -> "Mapping[str, type[Policy]]":
    """The policies that a text can name."""
    from kvprobe import policies

    named = {name: getattr(policies, name) for name in policies.__all__}
    return {
        name: kind
        for name, kind in named.items()
        if issubclass(kind, policies.Policy) and not isabstract(kind) and kind is not policies.Chain
    }


def _policy(node: ast.expr, text: str) -> "Policy":
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise UserError(_unreadable(text))
    name, known = node.func.id, dict(kinds())
    if name not in known:
        if name not in (added := extensions("policies")):
            raise UserError(unknown("policy", name[:40], [*known, *added]))
        known[name] = _added(name)
    taken = [field for field in fields(known[name]) if field.init]
    in_order = [field.name for field in taken if not field.kw_only]
    if len(node.args) > len(in_order):
        raise UserError(
            f"{name} takes at most {len(in_order)} settings ({', '.join(in_order)}), but {len(node.args)} are given; "
            "name the others."
        )
    settings = dict(zip(in_order, node.args, strict=False))
    for keyword in node.keywords:
        setting = str(keyword.arg)
        if setting not in (field.name for field in taken):
            raise UserError(f"{name}: {unknown('setting', setting, (field.name for field in taken))}")
        if setting in settings:
            raise UserError(f"{name} is given its {setting} twice; give it once.")
        settings[setting] = keyword.value
    for field in taken:
        if field.default is MISSING and field.default_factory is MISSING and field.name not in settings:
            raise UserError(f"{name} needs its {field.name}, which {_shown(text)} does not give.")
    hints = get_type_hints(known[name])
    return known[name](
        **{setting: _value(name, setting, hints[setting], node, text) for setting, node in settings.items()}
    )


def _added(name: str) -> "type[Policy]":
    """The policy that another package added under this name."""
    from kvprobe.policies import Policy

    kind = extension("policies", name)
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise UserError(f"The entry point {name!r} of kvprobe.policies must be a class of policies.")
    return kind


def _value(name: str, setting: str, hint: Any, node: ast.expr, text: str) -> Any:
    """A setting's value: a policy, or a literal of the type that the setting is declared with."""
    if setting == "policy":
        value = _policy(node, text)
    else:
        try:
            value = ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
            raise UserError(_unreadable(text)) from error
    if hint is float and type(value) is int and abs(value) < _EXACT:
        return float(value)
    if not _fits(value, hint):
        expected = "a policy that scores slots, such as TOVA(64)" if setting == "policy" else _words(hint)
        raise UserError(f"{name} has {setting}={str(value)[:40]}; it must be {expected}.")
    return value


def _fits(value: object, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return any(_fits(value, option) for option in get_args(hint))
    return isinstance(value, get_origin(hint) or hint)


def _words(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_words, get_args(hint)))
    kind = get_origin(hint) or hint
    known = {int: "a whole number", float: "a number", NoneType: "None", bool: "True or False", str: "a name"}
    name: str = kind.__name__
    return known.get(kind, name)


def _unreadable(text: str) -> str:
    return f"The policy {_shown(text)} cannot be read; write it as 'SinkWindow(4, 1020)' or as 'Quantise(4)'."


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:59]}…")
