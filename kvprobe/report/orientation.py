"""Which way the rows of a map go, in figures and on interactive pages alike: layers upward, as the field draws depth;
everything else downward, as a table is read."""

UPWARD = ("layer", "band")


def is_upward(axis: str) -> bool:
    """Whether the first row of this axis is at the bottom."""
    return axis in UPWARD
