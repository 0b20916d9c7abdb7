"""Where a view stands on a page: a `<div>` with what it says in words, then its data, which nothing runs or reads as markup."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import escape


def component(name: str, props: Mapping[str, Any], words: str, packed: Sequence[str] = ()) -> str:
    """A place for a component of kvprobe or CircuitsVis, with its props as JSON that cannot end its element.

    Args:
        words: what is read where no script runs; text, unless it is `Markup`.
        packed: data that the component unpacks when it needs them, in base 64.
    """
    data = json.dumps(props, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    inert = "".join(f'<script type="application/octet-stream;base64">{escape(each)}</script>' for each in packed)
    return (
        f'<div class="view" data-component="{escape(name)}">{escape(words)}</div>'
        f'<script type="application/json">{data}</script>{inert}'
    )


def figure(caption: str, view: str) -> str:
    """A view under its caption."""
    return f"<figure>\n<figcaption>{escape(caption)}</figcaption>\n{view}\n</figure>"
