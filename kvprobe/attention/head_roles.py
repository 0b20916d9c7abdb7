"""Roles of heads, by scores from the literature, on text that is made so that each role can be seen.

A role describes where a head looks, not what the model uses it for; patch or ablate the head for that.
"""

from collections.abc import Mapping

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.attention.patterns import attend, named_by_head
from kvprobe.errors import UserError
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.tasks.needle import Needle
from kvprobe.tasks.task import prompt
from kvprobe.text.tokens import Tokens
from kvprobe.tidy import crossed

THRESHOLDS: Mapping[str, float] = {"sink": 0.3, "previous": 0.4, "duplicate": 0.4, "induction": 0.4, "retrieval": 0.1}
"""The least score at which a head has a role: sink, Gu et al. 2024 (arXiv 2410.10781); retrieval, Wu et al. 2024 (arXiv
2404.15574). The papers behind the other three rank heads and name no threshold; 0.4 is what the ARENA course uses."""


@checked_arguments
def roles(
    model: Model, seed: int = 0, *, length: int = 25, copies: int = 4, sequences: int = 4, needles: int = 8
) -> pd.DataFrame:
    """How far each head is a sink, previous-token, duplicate-token, induction or retrieval head.

    One row per layer, head and role: `score`, `threshold`, and whether the head `has` the role. On sequences of random
    tokens that are repeated, a score is the mean over queries of the attention spent on

    - sink: the first slot (Gu et al. 2024),
    - previous: the slot before the query's own (Elhage et al. 2021),
    - duplicate: earlier slots of the same token, from the second copy on (Wang et al. 2022, arXiv 2211.00593),
    - induction: slots right after these, the prefix-matching score (Olsson et al. 2022, arXiv 2209.11895).

    The retrieval score is measured while the model answers from a needle in a text. Among the tokens of its answer that
    are in the needle, it is the share at which the head attends most, of all slots, to that same token in the needle
    (after Wu et al. 2024, who divide by all of the needle's tokens). NaN where the model has no tokenizer or copies
    nothing.

    Args:
        length: random tokens before they repeat.
        copies: how often these tokens appear.
        sequences: to average over.
        needles: texts to answer from; 0 leaves the retrieval score out.

    Raises:
        UserError: there is nothing to repeat, or the vocabulary has too few tokens.
    """
    if length < 2 or copies < 2 or sequences < 1 or needles < 0:
        raise UserError(
            f"length, copies, sequences and needles must be at least 2, 2, 1 and 0; got {length}, {copies}, "
            f"{sequences} and {needles}."
        )
    rng = torch.Generator().manual_seed(seed)
    drawn = [_repeated(model, length, copies, rng) for _ in range(sequences)]
    scores = torch.stack([_scores(model, tokens) for tokens in drawn]).mean(0)
    table = torch.cat([scores, _retrieval(model, needles, seed)[None]]).permute(1, 2, 0).numpy()
    axes = {"layer": model.geometry.attending, "head": range(table.shape[1]), "role": list(THRESHOLDS)}
    frame = crossed(axes, {"score": table})
    thresholds = [THRESHOLDS[role] for role in frame["role"]]
    return named_by_head(frame.assign(threshold=thresholds, has=frame["score"] >= thresholds))


def _repeated(model: Model, length: int, copies: int, rng: torch.Generator) -> Tokens:
    """Random tokens, all different, repeated, after the tokenizer's start token if it has one."""
    vocabulary, special, start = model.lanes.plain.config.get_text_config().vocab_size, set(), []
    if model.tokenizer is not None:
        vocabulary, special = min(vocabulary, len(model.tokenizer)), set(model.tokenizer.all_special_ids)
        start = [] if model.tokenizer.bos_token_id is None else [model.tokenizer.bos_token_id]
    ids = [token for token in torch.randperm(vocabulary, generator=rng).tolist() if token not in special][:length]
    if len(ids) < length:
        raise UserError(f"The vocabulary has {len(ids)} different tokens, but length is {length}; ask for fewer.")
    return Tokens.of(start + ids * copies)


def _scores(model: Model, tokens: Tokens) -> Float[Tensor, "roles layers heads"]:
    """The roles of `THRESHOLDS` without retrieval, in order, on one sequence of repeated tokens."""
    weights = attend(model, tokens, queries=range(len(tokens))).weights
    ids = torch.tensor(tokens.ids, device=weights.device)
    earlier = (ids[:, None] == ids).tril(-1)
    after_earlier = torch.nn.functional.pad(earlier, (1, 0))[:, :-1]
    repeats = earlier.any(1)

    def mass_on(slots: Tensor) -> Tensor:
        return (weights * slots).sum(-1)[..., repeats].mean(-1)

    previous = weights.diagonal(-1, 2, 3).mean(-1)
    return torch.stack([weights[..., 0].mean(-1), previous, mass_on(earlier), mass_on(after_earlier)]).cpu()


def _retrieval(model: Model, needles: int, seed: int) -> Float[Tensor, "layers heads"]:
    """The share of copied needle tokens at which each head attends most to the token that is being copied."""
    shape = model.geometry
    hits, copied = torch.zeros(len(shape.attending), shape.n_heads), 0
    if model.tokenizer is None:
        return torch.full_like(hits, torch.nan)
    task = Needle()
    for item in task.items(needles, seed):
        asking = prompt(item, model.tokenizer)
        generated = generate(model.lanes, [asking], max_new_tokens=task.max_new_tokens)
        answer = generated.tokens[0]
        needle = torch.arange(len(asking))[asking.part("source")]
        ids = torch.tensor(asking.ids)[needle]
        steps = [step for step, token in enumerate(answer) if token in ids]
        if not steps:
            continue
        # The answer is read again from the prompt's last token on, whose query chose the answer's first token.
        last = len(asking) - 1
        slots = torch.arange(generated.cache.slots, device=model.lanes.device)
        again = asking[last:].answered(answer, "answer")
        patterns = attend(model, again, generated.cache.select(slots=slots[None] < last), queries=steps)
        top = patterns.weights.argmax(-1).cpu()
        for place, step in enumerate(steps):
            hits += torch.isin(top[..., place], needle[ids == answer[step]])
        copied += len(steps)
    return hits / copied if copied else torch.full_like(hits, torch.nan)
