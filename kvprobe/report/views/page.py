"""Pages of views: one file or frame that needs no other, with a policy that keeps the browser from loading anything.

A page carries one copy of the scripts that draw all its views: kvprobe's own, and CircuitsVis' bundle from its wheel
for token views.
"""

import base64
import hashlib
import re
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np
from jaxtyping import Float
from jinja2 import ChoiceLoader, Environment, FileSystemLoader, PackageLoader, StrictUndefined
from jinja2.runtime import Context
from jinja2.utils import pass_context
from markupsafe import Markup
from torch import Tensor

from kvprobe import wording
from kvprobe.arguments import checked_arguments
from kvprobe.files import write_whole
from kvprobe.report.document import AttentionView, HeatMap, TokenView
from kvprobe.report.views.grids import heat_map, token_view
from kvprobe.report.views.patterns import attention_view, heads_view, patterns_view

if TYPE_CHECKING:
    from kvprobe.attention import Patterns
    from kvprobe.text.transcript import Transcript

Part = HeatMap | TokenView | AttentionView
FORMATS = ("percent", "points", "plain", "signed", "times")
"""Filters of templates that write a number with its interval; see `kvprobe.wording`."""
HEIGHTS = {TokenView: 24, HeatMap: 46, AttentionView: 70}
"""Of the frame in a notebook, in rem."""


class Showable(ABC):
    """A page for a file or a notebook."""

    @property
    @abstractmethod
    def html(self) -> str:
        """The document, which needs no other."""

    @property
    @abstractmethod
    def height(self) -> int:
        """Of its frame in a notebook, in rem."""

    def save(self, path: str | Path) -> Path:
        """Write the page as one HTML file that needs no other."""
        return write_whole(path, self.html)

    def show(self) -> None:
        """Show the page in the output of a notebook; elsewhere write it to a temporary file, and print its path."""
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        if hasattr(shell, "kernel"):
            sys.modules["IPython"].display.display(self)
        else:
            with tempfile.NamedTemporaryFile(prefix="kvprobe-", suffix=".html", delete=False) as file:
                print(self.save(file.name))

    def _repr_html_(self) -> str:
        # A frame separates the styles and scripts of the page from those of the notebook.
        style = f"width: 100%; height: {self.height}rem; border: 0"
        return f'<iframe sandbox="allow-scripts allow-downloads" srcdoc="{escape(self.html)}" style="{style}"></iframe>'


@dataclass(frozen=True)
class Page(Showable):
    """Maps, token views and attention on a page of their own, for a file or a notebook."""

    parts: Sequence[Part]
    title: str

    @property
    def html(self) -> str:
        return page(self.parts, self.title)

    @property
    def height(self) -> int:
        return max(HEIGHTS[type(part)] for part in self.parts) if self.parts else 24


@checked_arguments
def tokens(texts: Sequence[str], values: Mapping[str, Iterable[SupportsFloat]], title: str = "") -> Page:
    """A text coloured by values of its tokens: one value for each token under each label of `values`.

    Raises:
        UserError: there are no tokens or labels, too many, or not one finite value for each token.
    """
    layers = [[float(value) for value in layer] for layer in values.values()]
    view = TokenView("", list(texts), list(values), layers)
    token_view(view)
    return Page([view], title)


@checked_arguments
def attention(
    patterns: "Patterns",
    after: "Patterns | None" = None,
    *,
    chat: "Transcript | None" = None,
    title: str = "",
    caption: str = "",
    damaged: Sequence[int] = (),
    index: Float[np.ndarray | Tensor, "layers heads"] | None = None,
    index_name: str = "",
) -> Page:
    """Attention of `kv.attend`, head by head; with `after`, before and after an operation on the cache, and the change.

    The page opens at the head that changed most. See `kvprobe.report.views.patterns.patterns_view` for the arguments.
    """
    view = patterns_view(
        patterns, after, chat=chat, caption=caption, damaged=damaged, index=index, index_name=index_name
    )
    return Page([view], title)


@checked_arguments
def heads(
    weights: Float[Tensor, "layers heads queries slots"],
    tokens: Sequence[str],
    title: str = "",
    *,
    caption: str = "",
    queries: Sequence[int] | None = None,
    layers: Sequence[int] | None = None,
    masked: Sequence[int] = (),
    damaged: Sequence[int] = (),
    index: Float[np.ndarray | Tensor, "layers heads"] | None = None,
    index_name: str = "",
) -> Page:
    """Attention in a chosen layer and head, token by token; see `kvprobe.report.views.patterns.heads_view`."""
    view = heads_view(
        weights, tokens, caption, queries=queries, layers=layers, masked=masked, damaged=damaged, index=index,
        index_name=index_name,
    )  # fmt: skip
    return Page([view], title)


@checked_arguments
def page(parts: Sequence[Part], title: str) -> str:
    """A whole HTML page with these views, which needs no network.

    Raises:
        UserError: a view is empty, too large, or not a full grid of finite values.
    """
    return render("page.html.j2", parts, title=title)


def render(template: str, parts: Sequence[Part], **values: object) -> str:
    """A page from one of kvprobe's templates, which gets `parts` and the function `view` that draws one.

    The page's policy lets a browser run the scripts that the views need and nothing else, and load nothing but pictures
    that are in the page.
    """
    kinds = {type(part) for part in parts}
    scripts = [_circuitsvis()] if TokenView in kinds else []
    scripts += [_script("views.js")] if parts else []
    scripts += [_script("picture.js"), _script("attention.js")] if AttentionView in kinds else []
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes) or "'none'"
    return (
        templates()
        .get_template(template)
        .render(
            parts=parts,
            view=drawn,
            version=version("kvprobe"),
            scripts=[Markup(script) for script in scripts],
            policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {allowed}",
            **values,
        )
    )


@cache
def templates(folder: Path | None = None) -> Environment:
    """Those of kvprobe and, before them, those of a folder, compiled once.

    Filters write numbers with their intervals (`kvprobe.wording`), and by `label` the value of a key as the template's
    own `label` writes it. `capitalize` leaves all but the first letter as it is: V, German.
    """
    first = [FileSystemLoader(folder)] if folder else []
    loader = ChoiceLoader([*first, PackageLoader("kvprobe.report")])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {name: getattr(wording, name) for name in FORMATS} | {
        "label": _label,
        "capitalize": _capitalised,
    }
    return environment


def _capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


@pass_context
def _label(context: Context, value: Any, key: str) -> str:
    return context["label"](key, value)


def drawn(part: Part) -> Markup:
    """A view as markup."""
    if isinstance(part, AttentionView):
        return Markup(attention_view(part))
    return Markup(heat_map(part) if isinstance(part, HeatMap) else token_view(part))


@cache
def _script(name: str) -> str:
    return files("kvprobe.report").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _circuitsvis() -> str:
    bundle = files("circuitsvis").joinpath("dist/cdn/iife.js").read_text(encoding="utf-8")
    return re.sub(r"\n//# sourceMappingURL=.*", "", bundle.replace("</script", r"<\/script"))
