"""On what a result was made: versions, commit, machine, and the command that asked for it."""

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("kvprobe", "torch", "transformers", "transformer-lens", "sae-lens", "numpy")
_HERE = Path(__file__).resolve().parent
EDITED = "+edited:"
"""Between a commit and the digest of what was edited since."""


def environment() -> dict[str, Any]:
    """Versions of the packages that decide results, and what else may."""
    return {
        "versions": {package: _version(package) for package in PACKAGES},
        "python": platform.python_version(),
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": machine(),
    }


def software() -> dict[str, str | None]:
    """What a number is computed with: versions of the packages, and of kvprobe a digest of its code, which is the same
    in a checkout and where it is installed."""
    hasher = hashlib.blake2b(digest_size=8)
    for path in sorted(_HERE.rglob("*.py")):
        content = path.read_bytes()
        hasher.update(f"{path.relative_to(_HERE).as_posix()} {len(content)} ".encode() + content)
    return {package: _version(package) for package in PACKAGES} | {"kvprobe": f"of the code {hasher.hexdigest()}"}


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


def short_commit(commit: str) -> str:
    """A commit as reports name it, with `+edited` where the code had edits."""
    return commit[:12] + "+edited" * (EDITED in commit)


def version_in_words(environment: Mapping[str, Any]) -> str:
    """The version of kvprobe in an environment, and its commit if it ran from a checkout."""
    commit = environment.get("commit")
    return f"kvprobe {environment['versions'].get('kvprobe')}" + (f" ({short_commit(commit)})" if commit else "")


def _commit(here: Path = _HERE) -> str | None:
    """The commit of kvprobe's own checkout, if it runs from one; and a digest of edited files, if there are any."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(here), *words, "--", "."], capture_output=True, check=False)
        return os.fsdecode(done.stdout).strip()

    try:
        commit = git("log", "-1", "--format=%H")
        edited = commit and git("diff", "HEAD", "--name-only", "--relative", "-z").strip("\0")
    except FileNotFoundError:
        return None
    if not edited:
        return commit or None
    hasher = hashlib.blake2b(digest_size=8)
    for path in map(here.joinpath, edited.split("\0")):
        content = path.read_bytes() if path.is_file() else b"deleted"
        hasher.update(f"{path.relative_to(here)} {len(content)} ".encode() + content)
    return f"{commit}{EDITED}{hasher.hexdigest()}"
