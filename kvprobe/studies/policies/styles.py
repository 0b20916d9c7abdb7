"""How named policies are drawn, in every figure alike."""

from kvprobe.report.plots.lines import Style

POLICY_STYLES = {
    "sliding": Style("#56b4e9", "v"),
    "sinks": Style("#0072b2"),
    "sinks-gapped": Style("#0072b2", "s", "--"),
    "random": Style("#7f7f7f", "x"),
    "random-heads": Style("#7f7f7f", "+", "--"),
    "random-sinks": Style("#7f7f7f", "o", ":"),
    "h2o": Style("#009e73", "^"),
    "tova": Style("#cc79a7", "D"),
    "snapkv": Style("#d55e00"),
    "pyramidkv": Style("#d55e00", "s", "--"),
    "adakv": Style("#d55e00", "^", ":"),
    "quantise": Style("#000000", "*", ""),
    "sinks-quantised": Style("#e69f00", "P"),
}
"""A style for each entry of `kvprobe.policies.catalogue.CATALOGUE`."""
