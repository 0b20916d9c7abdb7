"""Whether the model uses what is left: asked for the secret, does it lean to the one whose cache it is given, and does
it say it?"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.forced import asked_logits
from kvprobe.inference.generate import decode_text, generate, stop_tokens
from kvprobe.inference.model import Model
from kvprobe.progress import Bar
from kvprobe.stats import SHARE, Estimate, estimate, jackknife
from kvprobe.text.tokens import Tokens, common_length

REPLY = 32
"""Tokens beside the secret within which a reply has to say it."""
FEWEST_ALIKE = 3
"""Secrets that take as many tokens in the answer below which none are compared."""


@dataclass(frozen=True)
class Answers:
    """What the model makes of a question under the caches of several secrets.

    Attributes:
        log_probs: of each secret as the answer under the cache of each, in nats.
        said: whether each is likeliest at every token; of `uses`, whether it stands in the model's own reply.
    """

    log_probs: Float[Tensor, "caches secrets"]
    said: Bool[Tensor, "caches secrets"]


@dataclass(frozen=True)
class Use:
    """How much a cache's own secret decides the answer.

    Attributes:
        effect: by how many nats a secret is likelier under its own cache than under that of another one: what
            exchanging the two would move.
        chosen: share of the caches under which its own gains more than any other secret; by chance one of them all.
        said: share of the caches under which the model says it.
    """

    effect: Estimate
    chosen: Estimate
    said: Estimate


def uses(
    model: Model, left: Sequence[KVCache], in_view: Sequence[KVCache], secrets: Sequence[str], ask: str, lead: str
) -> tuple[Use, Use]:
    """How much the secret decides the answer under what is left, and with everything in view.

    A secret is said if it stands in the model's own reply. How likely it is as the answer is read off the place where
    the model says it with everything in view (in most replies, where these differ), or after the lead if it never does.

    Raises:
        UserError: too few secrets take equally many tokens in the answer.
    """
    lead = lead.rstrip(" ")  # a word brings its space along
    longest = REPLY + max(len(model.tokenizer(secret)["input_ids"]) for secret in secrets)
    texts = [_replies(model, caches, ask, lead, longest) for caches in (left, in_view)]
    leads = Counter(
        text[:at] for text, secret in zip(texts[1], secrets, strict=True) if (at := _said_at(text, secret, lead)) >= 0
    )
    # Where it is never said, a space may begin the secret, as inside a sentence.
    begins = [leads.most_common(1)[0][0]] if leads else [f"{lead} ", lead] if lead else ["", " "]
    begun, rows = max(((one, _alike(model, secrets, one)) for one in begins), key=lambda pair: len(pair[1]))
    if len(rows) < FEWEST_ALIKE:
        raise UserError(
            f"In an answer that begins {begun!r} no {FEWEST_ALIKE} of the {len(secrets)} secrets that are asked for "
            "take as many tokens, so they cannot be compared; give others of one length, another lead, or a larger "
            "asked."
        )
    some = [secrets[row] for row in rows]

    def of(caches: Sequence[KVCache], texts: Sequence[str]) -> Use:
        said = torch.tensor([[_said_at(texts[row], secret, lead) >= 0 for secret in some] for row in rows])
        asking = Bar([caches[row] for row in rows], desc="Asking", unit="cache")
        return use_of(replace(answers(model, asking, some, ask, begun), said=said))

    return of(left, texts[0]), of(in_view, texts[1])


def _alike(model: Model, secrets: Sequence[str], begun: str) -> list[int]:
    """The numbers of the secrets that take as many tokens in an answer that begins so as most do."""
    lengths = [len(model.tokenizer(begun + secret, add_special_tokens=False)["input_ids"]) for secret in secrets]
    common = max(set(lengths), key=lengths.count)
    return [row for row, length in enumerate(lengths) if length == common]


def _replies(model: Model, caches: Sequence[KVCache], ask: str, lead: str, longest: int) -> list[str]:
    """The likeliest reply under each cache, from the lead on, which it begins with."""
    begun = model.tokenizer(lead, add_special_tokens=False)["input_ids"] if lead else []
    prompts = [
        prompt + Tokens.of(begun, "answer", prompt.following) for one in caches for prompt in model.prompts(one, ask)
    ]
    joined = KVCache.join(caches)
    replied = generate(model.lanes, prompts, joined, max_new_tokens=longest).tokens
    ends = stop_tokens(model.lanes)
    return [decode_text(model.tokenizer, [*begun, *ids], ends) for ids in replied]


def _said_at(text: str, secret: str, lead: str) -> int:
    """Where a reply says the secret after its lead; -1 where it does not."""
    return text.lower().find(secret.lower(), len(lead))


def answers(model: Model, caches: Iterable[KVCache], secrets: Sequence[str], ask: str, lead: str) -> Answers:
    """Ask under each cache for each secret.

    Args:
        ask: the user's next message.
        lead: how the answer begins, before the secret.

    Raises:
        UserError: the secrets take different numbers of tokens in the answer.
    """
    first, *begun = (model.tokenizer(lead + secret, add_special_tokens=False)["input_ids"] for secret in ("", *secrets))
    # Of the lead alone: how secrets begin alike is theirs to say.
    shared = min(common_length(first, other) for other in begun)
    endings = [tuple(ids[shared:]) for ids in begun]
    if len(set(map(len, endings))) > 1:
        raise UserError(
            f"In an answer that begins {lead!r} the secrets take {min(map(len, endings))} to {max(map(len, endings))} "
            "tokens, so they cannot be compared; give others of one length, or another lead."
        )
    ids = torch.tensor(endings)
    log_probs, said = [], []
    for cache in caches:
        (prompt,) = model.prompts(cache, ask)
        question = prompt + Tokens.of(begun[0][:shared], "answer", prompt.following)
        rows = [Tokens.of(ending, "answer", question.following) for ending in endings]
        scores = asked_logits(model, cache, question, rows).float().log_softmax(-1).cpu()
        log_probs.append(scores.gather(2, ids[..., None])[..., 0].double().sum(1))
        said.append((scores.argmax(-1) == ids).all(1))
    return Answers(torch.stack(log_probs), torch.stack(said))


def use_of(asked: Answers) -> Use:
    """How much the caches' own secrets decide the answers."""
    table = asked.log_probs.numpy()
    gains = table - table.mean(0)
    # Rounding must not choose: the own secret has to gain more than any other, not as much.
    own = np.diag(gains)
    others = np.where(np.eye(len(gains), dtype=bool), -np.inf, gains).max(1)
    return Use(
        exchange(table),
        estimate((own > others + 1e-6).astype(float), within=SHARE),
        estimate(asked.said.diagonal().double().numpy(), within=SHARE),
    )


def exchange(table: Float[np.ndarray, "caches secrets"]) -> Estimate:
    """The mean of a secret's number under its own cache less that under the others, with an interval over secrets.

    Leaving a secret out takes its cache and its answer.
    """
    own, count = np.diag(table), len(table)
    # With all secrets, and without each.
    own_sums = own.sum() - np.concatenate([[0.0], own])
    sums = table.sum() - np.concatenate([[0.0], table.sum(0) + table.sum(1) - own])
    sizes = np.concatenate([[count], np.full(count, count - 1)])
    effects = own_sums / sizes - (sums - own_sums) / (sizes * (sizes - 1))
    return jackknife(float(effects[0]), effects[1:])
