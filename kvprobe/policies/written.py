"""Policies written out as text, `SinkWindow(4, 252) | Quantise(4)`, as the command line and files name them.

A text is what Python would take, and a budget may be a share of the prompt: `SnapKV(50%)`. Nothing in it is run but the
policies' own constructors, with literals.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from functools import reduce
from inspect import isabstract
from typing import Any

from kvprobe import policies
from kvprobe.checks import is_text
from kvprobe.errors import UserError
from kvprobe.extensions import extension, extensions
from kvprobe.names import unknown
from kvprobe.policies.policy import Policy

LONGEST = 500
"""Most characters of a policy that is given as text."""

_QUOTED_OR_SHARE = re.compile(r"""("[^"]*"|'[^']*')|(\d+(?:\.\d+)?)\s*%(?=\s*[,)])""")


def as_policy(policy: object) -> Policy:
    """A policy, or the one that a text names.

    Raises:
        UserError: it is neither, the text cannot be read, or a policy refuses its settings.
    """
    if isinstance(policy, Policy):
        return policy
    if not is_text(policy):
        raise UserError(
            f"The policy is a {type(policy).__name__}, {str(policy)[:60]}; give one of kv.policies, or a text such as "
            "'SnapKV(50%)'."
        )
    if len(policy) > LONGEST:
        raise UserError(f"The policy has {len(policy):,} characters; it must have at most {LONGEST}.")
    return reduce(Policy.__or__, [_policy(member, policy) for member in _members(policy)])


def policies_of(given: Iterable[Policy | str]) -> dict[str, Policy]:
    """Policies by their texts; a text may hold several, with commas between them."""
    texts = (text for one in given for text in ([one] if isinstance(one, Policy) else _apart(str(one))))
    return {str(text): as_policy(text) for text in texts}


def _apart(text: str) -> list[str]:
    """The parts of a text between its commas, but for commas within brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _members(text: str) -> list[ast.expr]:
    """The calls of `A(1, b=2) | B(3)`; a share becomes a text."""
    quoted = _QUOTED_OR_SHARE.sub(lambda match: match[1] or f'"{match[2]}%"', text.strip())
    try:
        tree = ast.parse(quoted, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise UserError(_unreadable(text)) from error
    members: list[ast.expr] = []
    while isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
        members.append(tree.right)
        tree = tree.left
    return [tree, *reversed(members)]


def kinds() -> Mapping[str, type[Policy]]:
    """The policies that a text can name."""
    named = {name: getattr(policies, name) for name in policies.__all__}
    return {
        name: kind
        for name, kind in named.items()
        if issubclass(kind, Policy) and not isabstract(kind) and kind is not policies.Chain
    }


def _policy(node: ast.expr, text: str) -> Policy:
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
    return known[name](**{setting: _value(setting, node, text) for setting, node in settings.items()})


def _added(name: str) -> type[Policy]:
    """The policy that another package added under this name."""
    kind = extension("policies", name)
    if not (isinstance(kind, type) and issubclass(kind, Policy)):
        raise UserError(f"The entry point {name!r} of kvprobe.policies must be a class of policies.")
    return kind


def _value(setting: str, node: ast.expr, text: str) -> Any:
    """A setting's value: a policy, or a literal."""
    if setting == "policy":
        return _policy(node, text)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as error:
        raise UserError(_unreadable(text)) from error


def _unreadable(text: str) -> str:
    return (
        f"The policy {_shown(text)} cannot be read; write it as 'SinkWindow(4, 252)', 'SnapKV(50%)' or 'H2O(64) | "
        "Quantise(4)'."
    )


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:59]}…")
