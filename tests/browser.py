"""A browser without network, for what only a browser can show."""

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (CI installs it: see .ci/run)")
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND"),
    *("--enable-logging=stderr", "--window-size=900,1400", "--virtual-time-budget=10000"),
]


def browse(page: Path, profile: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    """Open a page; with `--dump-dom`, `stdout` is what it has become, and `stderr` holds the console."""
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={profile}", *extra, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
