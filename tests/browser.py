"""A browser without network, for what only a browser can show."""

import base64
import hashlib
import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (CI installs it: see .ci/run)")
OPTIONS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND"),
    *("--enable-logging=stderr", "--window-size=900,1400", "--virtual-time-budget=10000"),
]


def browse(page: Path, profile: Path, *extra: str, fragment: str = "") -> subprocess.CompletedProcess[str]:
    """Open a page; with `--dump-dom`, `stdout` is what it has become, and `stderr` holds the console."""
    command = [str(CHROMIUM), *OPTIONS, f"--user-data-dir={profile}", *extra, page.as_uri() + fragment]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def driven(page: str, driver: str, folder: Path, fragment: str = "") -> Any:
    """What a script says of a page: the JSON that it leaves as the body. The page's policy allows this script too."""
    allowed = base64.b64encode(hashlib.sha256(driver.encode()).digest()).decode()
    page = page.replace("script-src ", f"script-src &#39;sha256-{allowed}&#39; ", 1)
    path = folder / "page.html"
    path.write_text(page.replace("</body>", f"<script>{driver}</script></body>"), encoding="utf-8")
    done = browse(path, folder / "profile", "--dump-dom", fragment=fragment)
    assert "Content Security Policy" not in done.stderr
    assert "Uncaught" not in done.stderr
    return json.loads(html.unescape(re.findall(r"<body[^>]*>(.*)</body>", done.stdout, flags=re.DOTALL)[0]))
