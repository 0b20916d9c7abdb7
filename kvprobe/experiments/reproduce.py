"""What a report says of how to get its numbers again."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from kvprobe.report.document import Section


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
