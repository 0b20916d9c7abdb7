"""Latents as token views: the texts in which each latent of a dictionary is most active, coloured by its activation."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import pandas as pd

from kvprobe.errors import UserError
from kvprobe.report.document import TokenView
from kvprobe.report.views.page import Page
from kvprobe.saes.activating import Activating, Example
from kvprobe.text.tokens import Decoder, token_texts

BETWEEN = " ⋯\n"
"""Between two texts of a latent."""


def latent_view(latent: Activating, tokenizer: Decoder, note: str = "") -> TokenView:
    """A latent's texts one below the other, coloured by its activation.

    Args:
        note: what else to say about the latent.

    Raises:
        UserError: the latent is active nowhere.
    """
    if not latent.examples:
        raise UserError(f"Latent {latent.latent} is active nowhere in the recorded texts; choose another latent.")
    tokens, values = [], []
    for number, example in enumerate(latent.examples):
        if number:
            tokens.append(BETWEEN)
            values.append(0.0)
        # The component shows a line break inside a token as a line break, which would split the text.
        tokens += [text.replace("\n", "⏎") for text in token_texts(example.ids, tokenizer)]
        values += example.values
    caption = f"Latent {latent.latent}, active in {100 * latent.density:.2g} % of tokens. {note}".strip()
    return TokenView(caption, tokens, ["activation"], [values])


def latent_page(
    latents: Sequence[Activating], tokenizer: Decoder, title: str, notes: Sequence[str] | None = None
) -> Page:
    """A page of latents, for a file or a notebook, without those that are active nowhere."""
    pairs = zip(latents, [""] * len(latents) if notes is None else notes, strict=True)
    return Page([latent_view(latent, tokenizer, note) for latent, note in pairs if latent.examples], title)


def peak_words(latent: Activating, tokenizer: Decoder, count: int = 5) -> str:
    """The tokens at which a latent is most active, quoted, for a table."""

    def word(example: Example) -> str:
        return repr(token_texts(example.ids, tokenizer)[example.peak])

    return ", ".join(dict.fromkeys(map(word, latent.examples[:count]))) or "none"


def latents_table(latents: Sequence[Activating], tokenizer: Decoder) -> pd.DataFrame:
    """A row for each latent: its `density`, the `words` at which it is most active, and its `view`, as JSON; `null` for
    one that is active nowhere."""
    rows = []
    for latent in latents:
        view = asdict(latent_view(latent, tokenizer)) if latent.examples else None
        words = peak_words(latent, tokenizer)
        rows.append({"latent": latent.latent, "density": latent.density, "words": words, "view": json.dumps(view)})
    return pd.DataFrame(rows)
