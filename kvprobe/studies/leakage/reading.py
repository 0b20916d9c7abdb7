"""Reading the conversations: features of every arm, and what the model itself makes of the hidden secret.

Each context is read once up to the secret. The secrets are rows of one batch from there on, and each row's T3 is read
twice: with T1 and T2 masked, and with everything in view. The restart arms never see a secret before T3, so they are
computed once per context. One file per context is kept, so an interrupted run resumes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.experiments.parts import tensor_of_parts, tensor_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.forced import forced_logits
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import use_measurements
from kvprobe.models.lens import Family
from kvprobe.probing.features import Features, read_outs
from kvprobe.studies.leakage import Config
from kvprobe.tasks.designs import Target
from kvprobe.tasks.passcode import Context, conversation
from kvprobe.tasks.secrets import secret
from kvprobe.text.tokens import Tokens

FAMILIES: tuple[Family, ...] = ("k", "v", "resid_post")
PER_CONTEXT = ("before", "direct restart", "restart")
"""Arms that the secret cannot reach: one vector per context."""
FLOORS = {"direct": "direct restart", "masked": "restart"}
"""Which arm holds the same tokens at the same positions, computed without the hidden turns."""
USE_ARMS = ("full", "retained", "restart")
HIDDEN_SEGMENTS = ("T1", "T2")


@dataclass(frozen=True)
class Parts:
    """What was read: a file for each context, in order.

    Attributes:
        target: what is to be recovered.
    """

    paths: Sequence[Path]
    target: Target

    def tensor(self, name: str) -> Tensor:
        """One of all contexts together; see `read_context`."""
        return tensor_of_parts(self.paths, name)

    @cached_property
    def labels(self) -> Int[Tensor, "samples targets"]:
        return self.tensor("labels")

    @cached_property
    def contexts(self) -> Int[np.ndarray, "samples"]:
        """Number of each sample's context."""
        return np.repeat(np.arange(len(self.paths)), len(self.labels) // len(self.paths))

    def features(self, arm: str) -> Features:
        """What probes read of an arm."""
        texts = None
        if arm in FLOORS:
            by_context = [tuple(tensor_of_parts([path], f"text.{arm}").tolist()) for path in self.paths]
            texts = tuple(by_context[context] for context in self.contexts)
        return Features.of_read_outs(
            {family: self.tensor(f"{arm}.{family}") for family in FAMILIES},
            self.contexts if arm in PER_CONTEXT else np.arange(len(self.contexts)),
            self.labels.T.contiguous(),
            self.contexts,
            self.target,
            texts,
        )


def read(model: Model, config: Config, run: Run, part: str) -> Parts:
    """Read all conversations, or find what an earlier attempt read.

    Args:
        part: what the files are called.
    """
    hidden = secret(config.secret)
    per_context = config.samples // config.contexts
    texts = hidden.draw(config.contexts, per_context, np.random.default_rng([config.seed, 1]), model.tokenizer)

    def measure(conversation: tuple[Context, Sequence[str]]) -> dict[str, Tensor]:
        context, secrets = conversation
        labels = torch.tensor([hidden.labels(text) for text in secrets])
        return {**read_context(model, context, secrets, config.batch), "labels": labels}

    conversations = list(zip(hidden.contexts, texts, strict=False))
    paths = tensor_parts(run, conversations, part, measure, doing="Reading conversations", unit="context")
    return Parts(paths, hidden.target)


def read_context(model: Model, context: Context, secrets: Sequence[str], batch: int) -> dict[str, Tensor]:
    """Features and use measurements for one context and its secrets.

    Returns:
        `arm.family` of shape `[rows, layers, reads, dim]` with one row per secret, or one in all for the arms that
        the secret cannot reach; `text.direct` and `text.masked`, the tokens that these arms read; and per use arm and
        secret `logprob` and `correct` `[secrets, arms, tokens]` (of the true secret, token by token, the true tokens
        before it given), `margin` of the same shape (that log-probability less the mean over the conversation's other
        secrets' tokens) and `kl` `[secrets, arms]` (from the full context's distribution of the first such token to the
        arm's).
    """
    whole = [conversation(context, text).tokens(model.tokenizer) for text in secrets]
    start, third = whole[0].part("code").start, whole[0].span("T3").start
    answer, summary = whole[0].part("answer"), whole[0].span("summary2")
    code_tokens = answer.stop - answer.start

    _refuse_shifted(whole)
    prefix = model.capture(whole[0][:start], FAMILIES, segments=["summary1"], keep_cache=True)
    restart_tokens = conversation(context, secrets[0]).without(*HIDDEN_SEGMENTS).tokens(model.tokenizer)
    restart_answer = restart_tokens.part("answer").start
    restart = model.capture(restart_tokens[:restart_answer], FAMILIES, segments=["summary2", "T3"], keep_cache=True)
    assert restart.cache is not None
    length = summary.stop - summary.start
    features = {}
    for family in FAMILIES:
        again = restart.stack(family)
        features[f"before.{family}"] = read_outs(prefix.stack(family))
        features[f"direct restart.{family}"] = read_outs(again[..., :length, :])
        features[f"restart.{family}"] = read_outs(again[..., length:, :])
    features["text.direct"] = torch.tensor(whole[0].ids[summary])
    features["text.masked"] = torch.tensor(whole[0].ids[third : answer.start])

    every = torch.tensor([row.ids[answer] for row in whole])
    pieces: list[dict[str, Tensor]] = []
    for first in range(0, len(secrets), batch):
        rows = whole[first : first + batch]
        turn = model.capture([row[start:third] for row in rows], FAMILIES, past=prefix.cache, keep_cache=True)
        assert turn.cache is not None
        # The last code token is never fed: its probability is read off the token before it.
        asked = [row[third : answer.stop - 1] for row in rows]
        masked = model.capture(
            asked,
            FAMILIES,
            slots=range(answer.start - third),
            past=turn.cache.mask(*HIDDEN_SEGMENTS),
            logits=code_tokens,
        )
        _, full_logits = model.extend(turn.cache, asked, logits=code_tokens)
        restart_logits = forced_logits(model, restart.cache, restart.logits, [row[answer] for row in rows])

        read = summary.start - start
        piece = {}
        for family in FAMILIES:
            turned = turn.stack(family)
            piece[f"hidden.{family}"] = read_outs(turned[..., code_tokens:read, :])
            piece[f"direct.{family}"] = read_outs(turned[..., read:, :])
            piece[f"masked.{family}"] = read_outs(masked.stack(family))
        mine = list(range(first, first + len(rows)))
        piece |= use_measurements([full_logits, masked.logits, restart_logits], every.to(model.lanes.device), mine)
        pieces.append(piece)

    joined = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    return {name: tensor.contiguous().cpu() for name, tensor in (features | joined).items()}


def _refuse_shifted(rows: Sequence[Tokens]) -> None:
    """All secrets of a context must stand at the same slots, with the same tokens around them."""

    def around(row: Tokens) -> tuple:
        known = tuple(token for token, part in zip(row.ids, row.parts, strict=True) if part is None)
        return known, row.parts, row.segments

    if any(around(row) != around(rows[0]) for row in rows):
        raise UserError(
            "This tokenizer joins some secrets with the text around them (the digits of codes, say), so they would "
            "shift the tokens after them; use a model that tokenises them apart."
        )
