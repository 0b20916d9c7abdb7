"""Maps and token views as HTML: they answer the mouse and the keyboard, need no network, and run nothing that a token says.

A view is a `<div>` with what it says in words, followed by its data as JSON. A page carries one copy of the scripts that
draw all its views: kvprobe's own, which draws maps, and for token views CircuitsVis' bundle from its wheel.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, SupportsFloat

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvprobe.narrative import HeatMap, TokenView

MOST_CELLS, MOST_IN_A_LINE = 100_000, 4_096
"""What a browser draws at once: cells of a map and its rows or columns; values of a token view and its tokens."""


@dataclass(frozen=True)
class Page:
    """Maps and token views on a page of their own, for a file or a notebook."""

    parts: Sequence[HeatMap | TokenView]
    title: str

    def save(self, path: str | Path) -> Path:
        """Write the page as one HTML file that needs no other."""
        path = Path(path)
        path.write_text(page(self.parts, self.title), encoding="utf-8")
        return path

    def _repr_html_(self) -> str:
        # A frame of its own keeps the notebook's styles and scripts out, and those of the page in.
        document = escape(page(self.parts, self.title))
        height = 46 if any(isinstance(part, HeatMap) for part in self.parts) else 24
        style = f"width: 100%; height: {height}rem; border: 0"
        return f'<iframe sandbox="allow-scripts" srcdoc="{document}" style="{style}"></iframe>'


def tokens(texts: Sequence[str], values: Mapping[str, Iterable[SupportsFloat]], title: str = "") -> Page:
    """A text coloured by values of its tokens, one for each token under every label of `values`.

    Raises:
        ValueError: there are no tokens or labels, too many, or not one finite value for each token.
    """
    layers = [[float(value) for value in layer] for layer in values.values()]
    view = TokenView("", list(texts), list(values), layers)
    token_view(view)
    return Page([view], title)


def page(parts: Sequence[HeatMap | TokenView], title: str) -> str:
    """A whole HTML page with these views, which needs no network.

    Raises:
        ValueError: a view is empty, too large, or not a full grid of finite values.
    """
    return render("page.html.j2", parts, title=title)


def heat_map(data: HeatMap) -> str:
    """A map that tells the cell under the mouse or the arrow keys; blue above zero, red below, grey where there is none.

    Raises:
        ValueError: the map is empty, too large, or not a full grid of finite values.
    """
    _check_grid("map", data.values, {"rows": len(data.rows), "columns": len(data.columns)})
    props = {
        "rows": list(data.rows),
        "columns": list(data.columns),
        "values": [[value if value is None else _rounded(value) for value in row] for row in data.values],
        "unit": data.unit,
        "rowAxis": data.row_axis,
        "columnAxis": data.column_axis,
    }
    return _figure(data.caption, component("HeatMap", props, _largest(data)))


def token_view(data: TokenView) -> str:
    """CircuitsVis' `ColoredTokensMulti`: blue above zero, red below, every label on one scale.

    Raises:
        ValueError: the view is empty, too large, or has not one finite value for each token.
    """
    _check_grid("token view", data.values, {"labels": len(data.labels), "tokens": len(data.tokens)})
    layers = [[_rounded(value) for value in layer] for layer in data.values]
    # Below 1e-6 the component takes a bound for zero and divides by it.
    bound = max(1e-6, *(abs(value) for layer in layers for value in layer))
    props = {
        "tokens": [_inert(token) for token in data.tokens],
        "values": [list(values) for values in zip(*layers, strict=True)],
        "labels": list(data.labels),
        "positiveBounds": [bound] * len(layers),
        "negativeBounds": [-bound] * len(layers),
    }
    return _figure(data.caption, component("ColoredTokensMulti", props, "".join(data.tokens)))


def component(name: str, props: Mapping[str, Any], words: str) -> str:
    """A place for kvprobe's `HeatMap` or a component of CircuitsVis, with its props as JSON that cannot end its element.

    Args:
        words: what is read where no script runs.
    """
    data = json.dumps(props, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<div class="view" data-component="{escape(name)}">{escape(words)}</div>'
        f'<script type="application/json">{data}</script>'
    )


def render(template: str, parts: Sequence[HeatMap | TokenView], **values: Any) -> str:
    """A page from one of kvprobe's templates, which shows `parts` by its `view`.

    Its policy lets a browser run the scripts that the views need, and nothing else; all it may load is pictures in the page.
    """
    environment = Environment(
        loader=PackageLoader("kvprobe"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    scripts = [_circuitsvis()] if any(isinstance(part, TokenView) for part in parts) else []
    scripts += [_own()] if parts else []
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    runs = " ".join(f"'sha256-{each}'" for each in hashes) or "'none'"
    return environment.get_template(template).render(
        parts=parts,
        view=lambda part: Markup(heat_map(part) if isinstance(part, HeatMap) else token_view(part)),
        scripts=[Markup(script) for script in scripts],
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {runs}",
        **values,
    )


@cache
def _own() -> str:
    return files("kvprobe").joinpath("templates/views.js").read_text(encoding="utf-8")


@cache
def _circuitsvis() -> str:
    bundle = files("circuitsvis").joinpath("dist/cdn/iife.js").read_text(encoding="utf-8")
    return re.sub(r"\n//# sourceMappingURL=.*", "", bundle.replace("</script", r"<\/script"))


def _figure(caption: str, view: str) -> str:
    return f"<figure>\n<figcaption>{escape(caption)}</figcaption>\n{view}\n</figure>"


def _inert(token: str) -> str:
    # The component writes a token as markup in the text and as plain text in the tip, so escaping is wrong in one of
    # them. After `<` or `&`, a word joiner keeps both from opening anything (HTML standard, "tag open state" and
    # "character reference state") and is not seen in either.
    return re.sub("[<&]", "\\g<0>\u2060", token).replace("\t", "⇥").replace("\n", "↵\n")


def _largest(data: HeatMap) -> str:
    """The three cells furthest from zero, in words."""
    cells = [
        (abs(value), f"{data.row_axis} {row}, {data.column_axis} {column}: {value:+.4g} {data.unit}".strip())
        for row, line in zip(data.rows, data.values, strict=True)
        for column, value in zip(data.columns, line, strict=True)
        if value is not None
    ]
    largest = sorted(cells, key=lambda cell: -cell[0])[:3]
    return f"Largest of {len(cells):,} cells: {'; '.join(text for _, text in largest)}."


def _check_grid(kind: str, values: Sequence[Sequence[int | float | None]], sides: Mapping[str, int]) -> None:
    (down, height), (across, width) = sides.items()
    if len(values) != height or any(len(line) != width for line in values):
        raise ValueError(f"The {kind} has {height} {down} and {width} {across}; give values as [{down}][{across}].")
    if not height * width:
        raise ValueError(f"The {kind} has {height} {down} and {width} {across}; give it at least one of each.")
    if max(height, width) > MOST_IN_A_LINE or height * width > MOST_CELLS:
        raise ValueError(
            f"The {kind} has {height} {down} × {width} {across}; a browser draws at most {MOST_IN_A_LINE:,} of either "
            f"and {MOST_CELLS:,} values, so give a part or means."
        )
    if any(value is not None and not math.isfinite(value) for line in values for value in line):
        raise ValueError(f"The {kind} has a value that is not finite; leave its token out, or give None in a map.")


def _rounded(value: int | float) -> float:
    """To four significant digits: a map of 18,000 cells is then some 130 KB."""
    return float(f"{value:.4g}")
