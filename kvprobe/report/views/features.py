"""Pages of features: for each latent of a dictionary the texts that it is most active in, by CircuitsVis' coloured tokens."""

from collections.abc import Sequence
from typing import Any

from kvprobe.errors import UserError
from kvprobe.report.document import TokenView
from kvprobe.report.views.page import Page
from kvprobe.saes.activating import Activating, Example

BETWEEN = " ⋯\n"
"""Between two texts of a latent."""


def feature_view(found: Activating, tokenizer: Any, said: str = "") -> TokenView:
    """A latent's texts one below the other, coloured by its activation.

    Args:
        said: what else there is to know of the latent.

    Raises:
        UserError: the latent is active nowhere.
    """
    if not found.examples:
        raise UserError(f"Latent {found.latent} is active nowhere in what was recorded, so there is nothing to show.")
    tokens, values = [], []
    for number, example in enumerate(found.examples):
        if number:
            tokens.append(BETWEEN)
            values.append(0.0)
        # The component shows a line break inside a token as one, which would tear the text apart.
        tokens += [tokenizer.decode([token]).replace("\n", "⏎") for token in example.ids]
        values += example.values
    label = "activation"
    caption = f"Latent {found.latent}, active in {100 * found.density:.2g} % of tokens. {said}".strip()
    return TokenView(caption, tokens, [label], [values])


def feature_page(found: Sequence[Activating], tokenizer: Any, title: str, said: Sequence[str] | None = None) -> Page:
    """A page of latents, for a file or a notebook; those that are active nowhere are left out."""
    notes = [""] * len(found) if said is None else said
    shown = [feature_view(each, tokenizer, note) for each, note in zip(found, notes, strict=True) if each.examples]
    return Page(shown, title)


def peak_words(found: Activating, tokenizer: Any, count: int = 5) -> str:
    """The tokens at which a latent is most active, quoted, for a table."""

    def word(example: Example) -> str:
        return repr(tokenizer.decode([example.ids[example.peak]]))

    return ", ".join(dict.fromkeys(map(word, found.examples[:count]))) or "none"
