"""How reports write numbers, and how they say what to type to get them again."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.narrative import Section
from kvprobe.stats import Estimate


def estimate_of(values: Mapping[str, Any]) -> Estimate:
    """An estimate as `metrics.json` holds it, whatever stands beside its numbers."""
    return Estimate(values["mean"], values["low"], values["high"])


def percent(value: Estimate) -> str:
    return f"{100 * value.mean:.1f} % ({100 * value.low:.1f} to {100 * value.high:.1f})"


def points(value: Estimate) -> str:
    return f"{100 * value.mean:+.1f} points ({100 * value.low:+.1f} to {100 * value.high:+.1f})"


def plain(value: Estimate, digits: int = 2) -> str:
    return f"{value.mean:.{digits}f} ({value.low:.{digits}f} to {value.high:.{digits}f})"


def signed(value: Estimate, digits: int = 3) -> str:
    return f"{value.mean:+.{digits}f} ({value.low:+.{digits}f} to {value.high:+.{digits}f})"


def reproduce_section(study: str, config: Any, environment: Mapping[str, Any], also: Sequence[str]) -> Section:
    """The command, versions and machine of a run, and what else there is to know."""
    flags = " ".join(
        f"--{field.name.replace('_', '-')} {getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default
    )
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return Section(
        title="Reproduce",
        paragraphs=["On a CPU, the same command with the same seed on the same machine gives the same numbers."],
        points=[
            f"kvprobe run {study} {flags}".strip(),
            f"Seed {config.seed}; model {environment['model']}; {versions}; Python {environment['python']}.",
            f"{environment['machine']}; {environment['device']}"
            + (f"; commit {environment['commit'][:12]}." if environment["commit"] else "."),
            *also,
        ],
    )
