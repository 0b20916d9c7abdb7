"""Budgets as shares of the prompt, as in `SnapKV("50%")`: a number of slots once the prompt has been read."""

import re
from typing import Annotated

from kvprobe.checks import is_text, is_whole
from kvprobe.errors import UserError

Budget = Annotated[int | float | str, "a whole number of slots, or a share of the prompt's such as 0.5 or '50%'"]
"""Slots; or a share of the prompt's, such as `"50%"` or 0.5."""


class PromptShare(float):
    """A share of the slots that a prompt takes, above 0 and at most 1."""

    def __repr__(self) -> str:
        return f"{100 * self:g}%"

    __str__ = __repr__

    def of(self, prompt: int) -> int:
        """So many of these slots, at least one."""
        return max(1, round(self * prompt))


def as_budget(owner: str, name: str, value: object, low: int = 1) -> int | PromptShare:
    """A setting that is a number of slots or a share; anything else is refused."""
    percent = re.fullmatch(r"(\d{1,3}(?:\.\d+)?)\s*%", value.strip()) if is_text(value) else None
    share = float(percent[1]) / 100 if percent else value
    if isinstance(share, float) and 0 < share <= 1:
        return PromptShare(share)
    if not is_whole(value) or value < low:
        raise UserError(
            f"{owner} has {name}={repr(value)[:40]}; it must be a whole number of slots, at least {low}, or a share of "
            "the prompt's above 0 and up to 1, such as 0.5 or '50%'."
        )
    return int(value)
