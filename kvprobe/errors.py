"""The one exception that kvprobe raises for what its user can mend (any other is a defect of kvprobe), and its
warnings."""

import sys
import warnings


class UserError(ValueError):
    """What is wrong, what was expected, and what to do, in one sentence."""


class KvprobeWarning(UserWarning):
    """What was done may not be what was meant."""


def warn(text: str) -> None:
    """Warn at the line of the user's own code that called kvprobe: Python shows a text once for each such line, and in
    a notebook again in each cell."""
    caller = frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "kvprobe":
            caller = frame.f_back or frame
        frame = frame.f_back
    told = caller.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, KvprobeWarning, caller.f_code.co_filename, caller.f_lineno, registry=told)
