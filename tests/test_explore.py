"""The page on which published findings are explored, in a real browser, from a folder."""

import json
import re
from pathlib import Path

import pytest

from tests.browser import browse, needs_browser

ROOT = Path(__file__).resolve().parent.parent
FINDINGS = [
    {
        **{"name": name, "keys": {"rate": rate, "fault": fault}, "mean": mean * rate, "low": mean * rate / 2},
        **{"high": 2.0 * mean * rate, "clusters": 12, "unit": "nats", "comparisons": 4},
    }
    for name, mean in (("kl", 0.5), ("loss", 0.25))
    for fault in ("zeros", "<img src=x onerror=alert(1)>")
    for rate in (1, 10, 100)
]
PAGE = """<!doctype html><body><div id="explore" data-runs="runs" data-names='["one"]'></div>
<script>addEventListener("error", (event) => console.log("Uncaught"))</script><script src="explore.js"></script>
</body>"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    (tmp_path / "runs" / "one").mkdir(parents=True)
    (tmp_path / "runs" / "one" / "findings.js").write_text(f"kvprobeRun('one', {json.dumps(FINDINGS)})", "utf-8")
    (tmp_path / "explore.js").write_bytes((ROOT / "docs" / "explore.js").read_bytes())
    (tmp_path / "page.html").write_text(PAGE, "utf-8")
    return tmp_path / "page.html"


@needs_browser
@pytest.mark.parametrize(
    ("fragment", "marks", "says"),
    [
        ("", 6, "rate 10, fault zeros: 5 (2.5 to 10) nats, n = 12, together over 4 claims"),
        ("#run=one&finding=loss&along=fault&line=&at.rate=100", 2, "rate 100, fault zeros: 25 (12.5 to 50) nats"),
        ("#run=one&finding=kl&along=rate&line=fault&log=1", 6, "rate 100, fault zeros: 50 (25 to 100) nats"),
        ("#run=none&finding=none&panel=fault", 6, "rate 1, fault <img src=x onerror=alert(1)>: 0.5"),
    ],
)
def test_findings_are_drawn_as_the_address_says(page: Path, fragment: str, marks: int, says: str):
    done = browse(page, page.parent / "profile", "--dump-dom", fragment=fragment)
    assert "Uncaught" not in done.stderr
    titles = re.findall(r"<title>([^<]*)</title>", done.stdout)
    assert len(titles) == marks
    assert any(title.replace("&lt;", "<").replace("&gt;", ">").startswith(says) for title in titles), titles
    assert done.stdout.count("<svg") == (2 if "panel=fault" in fragment else 1)
    assert "<img" not in done.stdout
    ticks = re.findall(r'text-anchor="end"[^>]*>([^<]*)<', done.stdout)
    assert (ticks == ["1", "10", "100"]) == ("log=1" in fragment), ticks
