"""Commands on caches of engines."""

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvprobe.cli.flags import Source
from kvprobe.models.catalogue import Dtype


def audit(
    cache: Path,
    *,
    model: Source = "smollm2-135m",
    out: Annotated[Path | None, Parameter(help="Also write a page.")] = None,
    json: Annotated[bool, Parameter(help="Print JSON for a program.", negative="")] = False,
    device: str = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Say whether a cache is what a model could have written; exit code 1 if not.

    Args:
        cache: a file of kvprobe, or of any engine that `kvprobe engines` names.
        model: the model that is to have written it. What its clean caches hold is learnt once, in about a minute.
    """
    from kvprobe.engines.opened import open_cache

    opened = open_cache(cache)
    from kvprobe.detection.audit import audit as audited
    from kvprobe.inference.model import load

    found = audited(load(model, device=device, dtype=dtype), opened)
    if json:
        from json import dumps

        print(dumps(found.as_mapping(), indent=2))
    else:
        print(found)
    if out is not None:
        from kvprobe.report.views.audit import save_audit

        print(f"\nPage: {save_audit(found, out)}", file=sys.stderr if json else sys.stdout)
    sys.exit(int(found.suspicious))


def engines() -> None:
    """List the formats of caches that are read, and the engines installed here."""
    from kvprobe.engines.formats import described

    print("\n".join(described()))
