"""The page: its modules as they are, for a server; or all in one file with its data, which opens offline.

Either way a policy lets the browser run these scripts and nothing else, and load nothing from elsewhere.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kvprobe.app.address import ANYWHERE, MESSAGES, OFFERED, WHOLE_CACHE
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.files import write_whole
from kvprobe.report.views.page import templates

CLASSIC = ("views.js", "picture.js", "attention.js")
"""Scripts of reports, which the page draws maps and attention with."""
MODULES = ("state.js", "server.js", "strip.js", "replies.js", "pictures.js", "maps.js", "readings.js", "app.js")
"""In the order in which they need one another."""
STYLES = ("views.css", "app.css")
TYPES = {".js": "text/javascript", ".css": "text/css"}
EXAMPLE = "example.json"


@cache
def asset(name: str) -> str:
    """A script or style sheet by its name.

    Raises:
        KeyError: the page has none of this name.
    """
    if name not in (*CLASSIC, *MODULES, *STYLES):
        raise KeyError(name)
    folder = files("kvprobe.app") / "static" if name in (*MODULES, "app.css") else files("kvprobe.report") / "templates"
    return folder.joinpath(name).read_text(encoding="utf-8")


def example() -> dict[str, Any]:
    """A finished session on SmolLM2, as a page holds it."""
    return json.loads((files("kvprobe.app") / "static" / EXAMPLE).read_text(encoding="utf-8"))


def live_page() -> str:
    """The page that asks the server it came from; its policy is the server's."""
    links = [Markup('<link rel="stylesheet" href="static/{}">').format(name) for name in STYLES]
    classic = [Markup('<script src="static/{}"></script>').format(name) for name in CLASSIC]
    module = Markup('<script type="module" src="static/app.js"></script>')
    return _rendered(policy="", head=[*links], scripts=[*classic, module], data=None)


def offline_page(session: Mapping[str, Any]) -> str:
    """One file that shows these states and needs no other.

    Args:
        session: `states`, and the address `at` which it opens.
    """
    scripts = [asset(name) for name in CLASSIC]
    styles = "\n".join(asset(name) for name in STYLES)
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in [*scripts, bundle()])
    policy = (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data: blob:; script-src {allowed}; "
        f"style-src 'sha256-{_digest(styles)}'"
    )
    return _rendered(
        policy=policy,
        head=[Markup("<style>{}</style>").format(Markup(styles))],
        scripts=[
            *(Markup("<script>{}</script>").format(Markup(script)) for script in scripts),
            Markup('<script type="module">{}</script>').format(Markup(bundle())),
        ],
        data=session,
    )


def save_session(session: Mapping[str, Any], path: str | Path) -> Path:
    """Write the offline page."""
    return write_whole(path, offline_page(session))


@cache
def bundle() -> str:
    """The modules as one: what they import from each other is in the same scope."""
    joined = "\n".join(asset(name) for name in MODULES)
    return re.sub(r"^export ", "", re.sub(r"^import .*\n", "", joined, flags=re.MULTILINE), flags=re.MULTILINE)


def _rendered(policy: str, head: Sequence[Markup], scripts: Sequence[Markup], data: Mapping[str, Any] | None) -> str:
    inert = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    edits = {
        "faults": {name: fault.label for name, fault in CATALOGUE.items()},
        "policies": OFFERED,
        "whole": WHOLE_CACHE,
        "messages": MESSAGES,
        "anywhere": ANYWHERE,
    }
    return (
        templates(Path(str(files("kvprobe.app") / "static")))
        .get_template("app.html.j2")
        .render(
            policy=policy,
            head=head,
            scripts=scripts,
            data=Markup(inert),
            edits=Markup(json.dumps(edits).replace("<", "\\u003c")),
            version=version("kvprobe"),
        )
    )


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
