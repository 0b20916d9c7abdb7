"""How named faults are drawn, in every figure alike."""

from kvprobe.report.plots.lines import Style

_RED, _BLUE, _GREEN, _PINK = "#d55e00", "#0072b2", "#009e73", "#cc79a7"
_ORANGE, _SKY, _GREY = "#e69f00", "#56b4e9", "#7f7f7f"

FAULT_STYLES = {
    "gaussian": Style(_RED),
    "gaussian-head": Style(_RED, "s", "--"),
    "gaussian-channel": Style(_RED, "^", ":"),
    "gaussian-effect": Style(_RED, "D", "-."),
    "zeros": Style(_BLUE),
    "zero-keys": Style(_BLUE, "D", "-."),
    "zero-values": Style(_BLUE, "s", "--"),
    "distractor": Style(_GREEN),
    "distractor-keys": Style(_GREEN, "D", "-."),
    "distractor-values": Style(_GREEN, "v", ":"),
    "distractor-matched": Style(_GREEN, "s", "--"),
    "permuted": Style(_GREY, "x"),
    "permuted-keys": Style(_PINK),
    "pointers-swapped": Style(_GREY, "+", "--"),
    "pointers-repeated": Style(_ORANGE),
    "foreign-block": Style(_SKY, "s"),
    "stale-block": Style(_SKY, "D", "--"),
    "overlapping": Style("#000000", "v"),
    "shifted": Style(_PINK, "D", "--"),
    "fp8-scale": Style(_GREEN, "^"),
    "fp8-saturated": Style(_GREEN, "P", "--"),
    "rounded-2-bit": Style(_BLUE, "<"),
    "rounded-4-bit": Style(_BLUE, ">", "--"),
}
"""A style for each entry of `kvprobe.faults.catalogue.CATALOGUE`."""
