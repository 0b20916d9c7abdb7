"""The one exception that kvprobe raises for what its user can mend; any other is a defect of kvprobe."""


class UserError(ValueError):
    """What is wrong, what was expected, and what to do, in one sentence."""
