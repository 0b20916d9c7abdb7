"""The readme of the package, in which no link is relative, since a package index shows it away from the repository.

With a `Source` in `[project.urls]`, links lead there. Without one there is nowhere to lead: their words stay.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://)([^)\s]+)\)")


class Readme(MetadataHookInterface):
    """Gives the package README.md, made fit for an index."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, source)}


def absolute(text: str, source: str | None) -> str:
    """A page whose links lead into the repository at `source`; without one, its words without links and images."""

    def link(match: re.Match[str]) -> str:
        image, words, path = match.groups()
        if source is None:
            return "" if image else words
        return f"{image}[{words}]({source.rstrip('/')}/{'raw' if image else 'blob'}/HEAD/{path})"

    return LINK.sub(link, text)
