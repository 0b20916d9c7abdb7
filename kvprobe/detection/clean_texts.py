"""Texts of many kinds and lengths, of which a model's clean caches are made, and the benign differences that they are
given: the rounding of another engine."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from kvprobe.cache.cache import KVCache
from kvprobe.detection.bits import in_q8
from kvprobe.inference.model import Model
from kvprobe.models.geometry import embedded_tokens
from kvprobe.models.hooks import hooked
from kvprobe.saes.corpus import hand_written
from kvprobe.text.tokens import Tokens

SHORTEST = 12
_RANDOM, _SPLICED, _WRITTEN = 0.15, 0.3, 0.35
"""Shares of texts that are tokens at random, that begin as a conversation and go on with pieces of others, and that are
pieces of files: source code, styles, templates, settings."""
_CHARACTERS = 4
PIECES, _BETWEEN = Path(__file__).with_name("clean_texts.txt"), "\n\f\n"
"""Pieces of kvprobe's own files as they were once, and tables, records and logs that were drawn at random. They never
change, so that what is learnt is the same in all versions of kvprobe."""


def clean_texts(
    model: Model,
    count: int,
    longest: int,
    generator: np.random.Generator,
    shortest: int = SHORTEST,
    together: int = 1,
    chats: list[tuple[int, ...]] | None = None,
) -> list[Tokens]:
    """Conversations of kvprobe's tasks cut at random, pieces of them in a row, pieces of files, and tokens at random;
    those alone where the model has no tokenizer. Lengths are spread evenly on a logarithmic scale; so many `together`
    are of one length.

    Args:
        chats: what `chats_of` gives, where it is known already.
    """
    chats = chats_of(model) if chats is None else chats
    pieces = _pieces() if chats else []
    vocabulary = embedded_tokens(model.lanes.plain)
    limit = model.geometry.max_position
    longest = longest if limit is None else min(longest, limit)
    shortest = min(shortest, longest)
    lengths = np.exp(generator.uniform(np.log(shortest), np.log(longest), -(-count // together)))
    kinds = (generator.permutation(count) + generator.uniform(size=count)) / count if chats else np.zeros(count)

    def text(length: int, kind: float) -> Tokens:
        if kind < _RANDOM:
            return Tokens.of(generator.integers(0, vocabulary, length).tolist())
        if kind < _RANDOM + _WRITTEN:
            written = pieces[generator.integers(len(pieces))]
            start = int(generator.integers(max(1, len(written) - length * _CHARACTERS)))
            ids = model.tokenizer(written[start : start + length * 2 * _CHARACTERS])["input_ids"][:length]
            if len(ids) >= length:
                return Tokens.of(ids)
        ids = [*chats[generator.integers(len(chats))]]
        if kind < _RANDOM + _WRITTEN + _SPLICED:
            ids = ids[: int(generator.integers(4, 48))]
        while len(ids) < length:
            piece = chats[generator.integers(len(chats))]
            start = int(generator.integers(len(piece)))
            ids += piece[start : start + int(generator.integers(8, 64))]
        return Tokens.of(ids[:length])

    rounded = np.repeat(np.round(lengths).astype(int), together)[:count]
    return [text(int(length), float(kind)) for length, kind in zip(rounded, kinds, strict=True)]


def chats_of(model: Model) -> list[tuple[int, ...]]:
    """The conversations of kvprobe's tasks, as this model reads them; none without a tokenizer."""
    return [chat.ids for chat in hand_written(model)] if model.tokenizer is not None else []


def _pieces() -> list[str]:
    return PIECES.read_text(encoding="utf-8").split(_BETWEEN)


@contextmanager
def rounded_products(model: Model) -> Generator[None]:
    """While this lasts, what each product of the plain model is given is rounded to 8 bits in groups, as llama.cpp does
    it: the largest benign difference between engines that kvprobe has measured."""

    last: dict[str, Any] = {}

    def rounded(module: nn.Module, args: Any, kwargs: Any) -> Any:
        given = args[0]
        # Queries, keys and values are products with one tensor.
        if last.get("given") is not given or last["version"] != given._version:
            last.update(given=given, version=given._version, rounded=in_q8(given))
        return (last["rounded"], *args[1:]), kwargs

    modules = [module for module in model.lanes.plain.modules() if isinstance(module, nn.Linear)]
    with hooked([(module, "input", rounded) for module in modules]):
        yield


def as_by_another_engine(model: Model, texts: Sequence[Tokens]) -> KVCache:
    """The cache of texts as computed with rounded products and stored in 8 bits."""
    longest = max(map(len, texts))
    model.lanes.prove(longest, longest)
    with rounded_products(model):
        cache = model.prefill([*texts])
    layers = tuple({name: in_q8(tensor) for name, tensor in layer.items()} for layer in cache.layers)
    return replace(cache, layers=layers)
