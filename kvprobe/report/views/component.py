"""A view in a page: a `<div>` with its content in words, then its data, which is neither run nor read as markup."""

import json
from collections.abc import Mapping, Sequence

from markupsafe import escape


def component(name: str, props: Mapping[str, object], words: str, packed: Sequence[str] = ()) -> str:
    """A place for a component of kvprobe or CircuitsVis, with its props as JSON that cannot end its element.

    Args:
        words: the content for readers without scripts; text, unless it is `Markup`.
        packed: data that the component unpacks when it needs them, in base 64.
    """
    data = json.dumps(props, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    inert = "".join(f'<script type="application/octet-stream;base64">{escape(text)}</script>' for text in packed)
    return (
        f'<div class="view" data-component="{escape(name)}">{escape(words)}</div>'
        f'<script type="application/json">{data}</script>{inert}'
    )


def figure(caption: str, view: str) -> str:
    """A view under its caption."""
    return f"<figure>\n<figcaption>{escape(caption)}</figcaption>\n{view}\n</figure>"
