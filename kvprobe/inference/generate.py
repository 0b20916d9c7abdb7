"""The decode loop: greedy or sampled, batched, at explicit positions, with access to the cache at each step."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.arguments import AtLeastOne, AtLeastZero, checked_arguments
from kvprobe.brief import Brief, Table, brief
from kvprobe.cache.cache import KVCache
from kvprobe.cache.device import pick_device
from kvprobe.cache.entries import entries
from kvprobe.cache.ledger import PADDING
from kvprobe.errors import UserError
from kvprobe.inference.forward import extend
from kvprobe.inference.readable import require_type
from kvprobe.inference.under_policy import Snapshot, apply, lane_for, read_for, sample_numbers
from kvprobe.models.lanes import Lanes
from kvprobe.models.packed import packed_if_faster
from kvprobe.models.unproved import Lane
from kvprobe.policies.policy import Policy, Scene
from kvprobe.policies.written import as_policy
from kvprobe.text.tokens import GENERATED, Decoder, Tokens

COLDEST = 1e-30
"""Least temperature: at lower ones logits overflow."""
OnStep = Callable[[int, KVCache], KVCache | None]


@dataclass(frozen=True, repr=False)
class Generation(Brief):
    """What was generated, row by row.

    Attributes:
        tokens: generated ids, a stop token included where one ended the row.
        logprobs: log-probability of each generated token under the model (before temperature and top-p).
        stopped: whether a stop token ended the row (else it reached `max_new_tokens`).
        texts: decoded text without control tokens; empty without a tokenizer.
        cache: of all tokens read, less what the policy removed; the last generated token of a row was not read.
        trace: what the cache held at each step, after the policy acted; empty without a policy.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    stopped: tuple[bool, ...]
    texts: tuple[str, ...]
    cache: KVCache
    trace: tuple[Snapshot, ...] = ()

    def _facts(self) -> Iterable[str]:
        yield f"texts={brief(self.texts, 400)}"
        yield f"{brief([len(row) for row in self.tokens])} tokens"
        yield f"cache={brief(self.cache)}"

    def _table(self) -> Table:
        columns = ("text", "tokens", "mean log-probability", "stopped")
        means = [sum(row) / len(row) if row else float("nan") for row in self.logprobs]
        texts = self.texts or ("",) * len(self.tokens)
        return columns, zip(texts, map(len, self.tokens), means, self.stopped, strict=True)

    @property
    def text(self) -> str:
        """The text of the only row.

        Raises:
            UserError: there are several rows; use `texts`.
        """
        if len(self.texts) != 1:
            raise UserError(f"`text` is of one row, but there are {len(self.texts)} rows; take one from `texts`.")
        return self.texts[0]


def generate(
    lanes: Lanes,
    prompts: Sequence[Tokens],
    past: KVCache | None = None,
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: Collection[int] | None = None,
    generators: Sequence[torch.Generator] | None = None,
    policy: Policy | str | None = None,
    samples: Sequence[int] | None = None,
    on_step: OnStep | None = None,
    lane: Lane | Literal["auto"] = "auto",
) -> Generation:
    """Read one prompt per row after `past`, and continue each until a stop token or `max_new_tokens`.

    Args:
        temperature: 0 is greedy; otherwise tokens are sampled.
        top_p: sample only from the most probable tokens that together reach this probability.
        stop: ids that end a row; the model's own end tokens by default.
        generators: for sampling, one per row, so that a row does not depend on the rows beside it.
        policy: or its text, such as "SnapKV(50%)"; acts on the cache after the prompt, and then after every
            `policy.every` tokens. If it needs attention, slots of `past` count as never attended to before.
        samples: numbers of the rows' samples, for policies that draw; 0, 1, … by default.
        on_step: called after each pass with the number of tokens generated so far and the cache; may return
            an edited cache to continue with.
        lane: `auto` is plain, unless the policy needs attention scores that only the hooked lane shows.

    Raises:
        UserError: a setting out of range, or sampling without one generator per row.
    """
    _check(temperature, top_p, generators, len(prompts))
    ends, numbers = end_tokens(lanes, stop), sample_numbers(samples)
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    stopped = [False] * len(prompts)

    policy = None if policy is None else as_policy(policy)
    observes, observes_again = (policy and policy.observes), (policy and policy.observes_again)
    cache, following, trace = past, prompts, list[Snapshot]()
    scene = None if policy is None or past is None else Scene(past)
    decoding = lane_for(lanes, lane, watched=observes_again is not None)
    # What `on_step` does may change the model.
    once = lanes.looked_at() if on_step is None else nullcontext()
    with once, packed_if_faster(lanes, decoding, len(prompts), max_new_tokens):
        for step in range(max_new_tokens):
            if policy is None:
                cache, logits = extend(lanes, cache, following, decoding)
                cache = _with_ended_rows_padded(cache, stopped)
            else:
                scene, logits = read_for(lanes, observes_again if step else observes, scene, following, lane)
                scene = scene.with_cache(_with_ended_rows_padded(scene.cache, stopped))
                ended = tuple(row for row, over in enumerate(stopped) if over)
                scene = apply(lanes, policy, replace(scene, samples=numbers, ended=ended), step, lane)
                cache = scene.cache
                trace.append(Snapshot.of(step, scene, policy))
            if on_step is not None and (edited := on_step(step, cache)) is not None:
                require_type("What on_step returns", edited, KVCache, "the edited KVCache, or None")
                if edited.batch != cache.batch:
                    raise UserError(
                        f"What on_step returns is a batch of {edited.batch}, but {cache.batch} rows are being "
                        "continued; return as many, in their order."
                    )
                cache, scene = edited, scene and scene.with_cache(edited)
            chosen = _choose(logits[:, -1], temperature, top_p, generators)
            scores = logits[:, -1].float().log_softmax(-1).gather(1, chosen[:, None])[:, 0]
            chosen_tokens = entries(chosen, int)
            for row, (token, score) in enumerate(zip(chosen_tokens, entries(scores, float), strict=True)):
                if not stopped[row]:
                    tokens[row].append(token)
                    logprobs[row].append(score)
                    stopped[row] = token in ends
            if all(stopped):
                break
            positions = entries(cache.ledger.following, int)
            following = [
                Tokens.of([token], GENERATED, position)
                for token, position in zip(chosen_tokens, positions, strict=True)
            ]

    assert cache is not None  # at least one pass was made
    texts = tuple(decode_text(lanes.tokenizer, row, ends) for row in tokens)
    return Generation(
        tuple(map(tuple, tokens)), tuple(map(tuple, logprobs)), tuple(stopped), texts, cache, tuple(trace)
    )


@checked_arguments
def row_generators(seed: AtLeastZero, rows: AtLeastOne, device: torch.device | str = "cpu") -> list[torch.Generator]:
    """One generator per row, each seeded from `seed` and the row's number."""
    seeds = [int(np.random.SeedSequence([seed, row]).generate_state(1, np.uint64)[0] >> 1) for row in range(rows)]
    where = pick_device(device)
    return [torch.Generator(where).manual_seed(row_seed) for row_seed in seeds]


def end_tokens(lanes: Lanes, stop: Collection[int] | None) -> frozenset[int]:
    """The ids that end a row: those in `stop`, or else the model's own."""
    return frozenset(stop_tokens(lanes) if stop is None else stop)


def stop_tokens(lanes: Lanes) -> list[int]:
    """The ids that end the model's own messages."""
    settings: Any = lanes.plain.generation_config  # transformers' annotation is incomplete
    configured: int | list[int] | None = None if settings is None else settings.eos_token_id
    if configured is None:
        return []
    return [configured] if isinstance(configured, int) else list(configured)


def _choose(
    logits: Float[Tensor, "batch vocab"],
    temperature: float,
    top_p: float,
    generators: Sequence[torch.Generator] | None,
) -> Int[Tensor, "batch"]:
    if temperature == 0 or generators is None:
        return logits.argmax(-1)
    probabilities = (logits.float() / temperature).softmax(-1)
    if top_p < 1:
        ordered, order = probabilities.sort(-1, descending=True)
        # A token stays if those before it do not reach top_p yet; the first always stays.
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
    drawn = [
        torch.multinomial(row.to(generator.device), 1, generator=generator)
        for row, generator in zip(probabilities, generators, strict=True)
    ]
    return torch.cat(drawn).to(logits.device)


def _with_ended_rows_padded(cache: KVCache, rows: Sequence[bool]) -> KVCache:
    """The cache with padding in the last slot of the rows that have ended: they stay in the batch, but read nothing."""
    if not any(rows):
        return cache
    ended = torch.tensor(rows, device=cache.ledger.tokens.device)
    segments, live = cache.ledger.segments.clone(), cache.ledger.live.clone()
    segments[ended, -1] = PADDING
    live[:, ended, :, -1] = False
    following = cache.ledger.following - ended.long()
    return replace(cache, ledger=replace(cache.ledger, segments=segments, live=live, following=following))


def _check(temperature: float, top_p: float, generators: Sequence[torch.Generator] | None, rows: int) -> None:
    if temperature != 0 and not COLDEST <= temperature < float("inf"):
        raise UserError(f"temperature is {temperature}; it must be 0 (greedy) or at least {COLDEST:g}.")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p is {top_p}; it must be above 0 and at most 1.")
    if temperature > 0 and len(generators or ()) != rows:
        raise UserError(f"Sampling needs one torch.Generator per row ({rows}); make them with kvprobe.row_generators.")


def decode_text(tokenizer: Decoder | None, tokens: Sequence[int], ends: Collection[int]) -> str:
    """The text of generated tokens without those that end an answer; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    return tokenizer.decode([token for token in tokens if token not in ends], skip_special_tokens=True)
