"""On what a result was made: versions, commit, machine, and the command that asked for it."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("kvprobe", "torch", "transformers", "transformer-lens", "sae-lens", "numpy")


def environment() -> dict[str, Any]:
    """Versions of the packages that decide results, and what else may."""
    return {
        "versions": {package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": machine(),
    }


def machine() -> str:
    """Such as `Linux x86_64, 2 cores with AVX2`; torch's vectors decide how it rounds and how fast it is."""
    import torch  # heavy, and loaded by then

    vectors = torch.backends.cpu.get_cpu_capability()
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores with {vectors}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of kvprobe's own checkout, if it runs from one."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "log", "-1", "--format=%H", "--", str(here)],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
