"""What a policy does to the number of slots, from the policy or from its text, `SinkWindow(4, 1020)`."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvprobe.cache.slots import Evicts, Rounds, SlotPlan
from kvprobe.errors import UserError

if TYPE_CHECKING:
    from kvprobe.policies import Policy


def plan_of(policy: "Policy | str", prompt: int = 1) -> SlotPlan:
    """The plan of a policy of `kv.policies`, or of its text: `SinkWindow(4, 1020) | TOVA(512)`, `Quantise(4)`.

    Args:
        prompt: tokens of the prompt of which budgets may be shares; `SlotPlan.at` gives the plan for another.

    Raises:
        UserError: it is not a policy, it has a setting that it cannot have, its number of slots depends on a text, or
            it is a chain whose number of slots does not follow from the settings.
    """
    # Policies need torch, which a budget without one does not.
    from kvprobe.policies.written import as_policy

    return _plan(str(policy), as_policy(policy).parts, prompt)


def _plan(name: str, members: "Sequence[Policy]", prompt: int) -> SlotPlan:
    """The plan for a prompt of so many tokens, of which shares are; it can be had for another."""
    counts = [member.at(prompt).slot_count for member in members]
    evicts = tuple(count for count in counts if isinstance(count, Evicts))
    rounds = [count for count in counts if isinstance(count, Rounds)]
    if len(rounds) > 1 or (rounds and evicts):
        raise UserError(
            f"{name} both rounds and evicts slots, so the number of rounded slots depends on which are evicted; "
            "give one of the two."
        )
    if len(evicts) > 1 and any(count.beta is not None or not count.even for count in evicts):
        raise UserError(
            f"{name} has budgets that differ by layer or head in a chain, so its settings do not determine the "
            "number of retained slots; give one policy."
        )
    shares = any(member.at(1) is not member for member in members)
    return SlotPlan(name, evicts, rounds[0] if rounds else None, partial(_plan, name, members) if shares else None)
