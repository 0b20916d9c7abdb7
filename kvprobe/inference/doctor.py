"""The doctor: checks on real text whether kvprobe computes the right numbers on a model."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from kvprobe.arguments import checked_arguments
from kvprobe.cache.entries import entries
from kvprobe.errors import UserError
from kvprobe.inference.forward import extend
from kvprobe.inference.generate import generate, stop_tokens
from kvprobe.inference.model import Model
from kvprobe.models.lens import Family
from kvprobe.models.unproved import Lane
from kvprobe.text.tokens import Tokens

_LENGTH, _CUT = 48, 32
_TEXT = (
    "Ada keeps a garden behind the old mill. In spring she sows beans, peas and carrots; in autumn she gathers apples, "
    "and every year she writes down how much there was of each, and what the weather had been like."
)


@dataclass(frozen=True)
class Agreement:
    """How far apart two ways to compute the same thing are.

    Attributes:
        difference: the largest difference, relative to the largest value compared (0 or 1 for greedy decoding).
        allowed: the largest difference that passes.
    """

    name: str
    difference: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.allowed


@checked_arguments
def examine(model: Model) -> Iterator[Agreement]:
    """Run the checks, one after the other.

    In float32 each check has its own tolerance. In half precision all are 5 %, since there the order of a sum alone
    changes logits by a few per cent.
    """

    def allowed(in_float32: float) -> float:
        return in_float32 if model.lanes.dtype == torch.float32 else 0.05

    tokens = _sample(model)
    plain, plain_logits = extend(model.lanes, None, [tokens], "plain", logits=_LENGTH)
    lanes = _proved_lanes(model)
    if "hooked" in lanes:
        hooked, hooked_logits = extend(model.lanes, None, [tokens], "hooked", logits=_LENGTH)
        yield Agreement("both lanes agree on logits", _difference(plain_logits, hooked_logits), allowed(1e-4))
        yield Agreement(
            "both lanes agree on K and V in the cache",
            _largest(
                _difference(one, other)
                for one, other in zip(plain.keys + plain.values, hooked.keys + hooked.values, strict=True)
            ),
            allowed(1e-5),
        )
        yield from _hooks_against_cache(model, tokens, allowed(1e-6))
    for lane in lanes:
        yield _masking_against_eviction(model, tokens, lane, allowed(1e-5))
    half, _ = extend(model.lanes, None, [tokens[:_CUT]])
    _, cached = extend(model.lanes, half, [tokens[_CUT:]], logits=_LENGTH - _CUT)
    yield Agreement("cached equals uncached", _difference(cached, plain_logits[:, _CUT:]), allowed(1e-5))
    yield _greedy_against_library(model, tokens[:_CUT])


def limits(model: Model) -> list[str]:
    """What the model cannot be used for, one sentence each: the hooked lane, closed gaps, masks per head."""
    sentences: list[str] = []
    for name in ("hooked", "rotaries"):
        try:
            getattr(model.lanes, name)
        except UserError as refusal:
            sentences.append(str(refusal))
    if not model.lanes.masks_by_head:
        sentences.append(f"The heads of {type(model.lanes.plain).__name__} cannot be masked apart from one another.")
    return sentences


def _proved_lanes(model: Model) -> list[Lane]:
    """The lanes that passed the gate."""
    try:
        _ = model.lanes.hooked
    except UserError:
        return ["plain"]
    return ["plain", "hooked"]


def _hooks_against_cache(model: Model, tokens: Tokens, allowed: float) -> Iterator[Agreement]:
    """K and V as TransformerLens hooks show them, against those in the cache."""
    layers = range(model.geometry.n_layers)
    families: list[Family] = [family for family in ("k", "v") if model.lanes.hooked.fires(family)]
    hooked: dict[tuple[Family, int], Tensor] = {}

    def observe(family: Family, layer: int, tensor: Tensor) -> None:
        hooked[family, layer] = tensor.transpose(1, 2)

    with model.lanes.hooked.observing(families, layers, observe):
        cache, _ = extend(model.lanes, None, [tokens], "hooked")
    stored = {"k": cache.keys, "v": cache.values}
    for family in families:
        worst = _largest(_difference(hooked[family, layer], stored[family][layer]) for layer in layers)
        yield Agreement(f"{family.upper()} read from hooks equals {family.upper()} in the cache", worst, allowed)


def _masking_against_eviction(model: Model, tokens: Tokens, lane: Lane, allowed: float) -> Agreement:
    cache, _ = extend(model.lanes, None, [tokens[:_CUT]], lane)
    hidden = torch.zeros(1, _CUT, dtype=torch.bool, device=model.lanes.device)
    hidden[:, _CUT // 4 : _CUT // 2] = True
    # New tokens stand so far on that the edge of a sliding window, if there is one, lies inside the cache.
    windows = [window for window in model.geometry.windows if window is not None]
    jump = max(0, min(windows) - _CUT // 4) if windows else 0
    rest = [tokens[_CUT:].shifted(_CUT + jump)]
    _, masked = extend(model.lanes, cache.mask(slots=hidden), rest, lane, logits=len(rest[0]))
    _, evicted = extend(model.lanes, cache.evict(slots=hidden), rest, lane, logits=len(rest[0]))
    return Agreement(f"masking equals eviction ({lane} lane)", _difference(masked, evicted), allowed)


def _greedy_against_library(model: Model, tokens: Tokens) -> Agreement:
    ours = generate(model.lanes, [tokens], max_new_tokens=16).tokens[0]
    plain: Any = model.lanes.plain  # `generate` is of a mixin that transformers does not type
    settings = GenerationConfig(
        max_new_tokens=16,
        do_sample=False,
        eos_token_id=stop_tokens(model.lanes) or None,
        pad_token_id=0,
        # It cannot count what a cache holds of which no layer attends.
        use_cache=bool(model.geometry.attending),
    )
    defaults = plain.generation_config
    # The library would take settings left open from here, such as a repetition penalty, which greedy decoding lacks.
    plain.generation_config = GenerationConfig()
    try:
        theirs = plain.generate(
            torch.tensor([tokens.ids], device=model.lanes.device),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long, device=model.lanes.device),
            generation_config=settings,
        )[0, len(tokens) :]
    finally:
        plain.generation_config = defaults
    return Agreement("greedy decoding equals the library's own", float(list(ours) != theirs.tolist()), 0.0)


def _sample(model: Model) -> Tokens:
    """Some text, or seeded random ids where there is no tokenizer."""
    if model.tokenizer is not None:
        ids = model.tokenizer(_TEXT)["input_ids"]
        return Tokens.of((ids * (_LENGTH // len(ids) + 1))[:_LENGTH])
    config: Any = model.lanes.plain.config  # transformers' annotation is incomplete
    vocabulary = config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return Tokens.of(entries(torch.randint(0, vocabulary, (_LENGTH,), generator=generator), int))


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).abs().max() / one.float().abs().max())


def _largest(differences: Iterable[float]) -> float:
    """The largest difference, or NaN if any is NaN: `max` of Python could skip it."""
    return float(torch.tensor(list(differences)).max())
