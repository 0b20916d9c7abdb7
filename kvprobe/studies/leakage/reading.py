"""Reading the conversations: features of every arm, and what the model itself makes of the hidden secret.

Each context is read once up to the secret. The secrets are rows of one batch from there on, and each row's T3 is read
twice: with T1 and T2 masked, and with everything in view. The restart arms never see a secret before T3, so they are
computed once per context. One file per context is kept, so an interrupted run resumes.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvprobe.experiments.parts import Parts, arms_of_parts, tensor_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.forced import forced_logits
from kvprobe.inference.model import Model
from kvprobe.models.lens import Family
from kvprobe.probing.arms import Arms, arm_read_outs
from kvprobe.probing.variants import Logits, Variants
from kvprobe.studies.leakage import Config
from kvprobe.tasks.passcode import Context, conversation
from kvprobe.tasks.secrets import secret
from kvprobe.text.tokens import Tokens

FAMILIES: tuple[Family, ...] = ("k", "v", "resid_post")
FLOORS = {"direct": "direct restart", "masked": "restart"}
"""Which arm holds the same tokens at the same positions, computed without the hidden turns."""
USE_ARMS = ("full", "retained", "restart")
HIDDEN_SEGMENTS = ("T1", "T2")


def read(model: Model, config: Config, run: Run, part: str) -> Arms:
    """Read all conversations, or find what an earlier attempt read.

    Args:
        part: what the files are called.
    """
    hidden = secret(config.secret)
    per_context = config.samples // config.contexts
    texts = hidden.draw(config.contexts, per_context, np.random.default_rng([config.seed, 1]), model.tokenizer)
    cases, doing = list(zip(hidden.contexts, texts, strict=False)), "Reading conversations"
    paths = Parts(model, config, run).tensors(measure, cases, part, doing=doing, unit="context")
    read = {arm: [tuple(tensor_of_parts([path], f"text.{arm}").tolist()) for path in paths] for arm in FLOORS}
    return replace(arms_of_parts(paths, FAMILIES, hidden.target), texts=read)


def measure(model: Model, config: Config, case: tuple[Context, Sequence[str]]) -> dict[str, Tensor]:
    """What `read_context` gives, and the labels of the secrets."""
    context, secrets = case
    labels = torch.tensor([secret(config.secret).labels(text) for text in secrets])
    return {**read_context(model, context, secrets, config.batch), "labels": labels}


def read_context(model: Model, context: Context, secrets: Sequence[str], batch: int) -> dict[str, Tensor]:
    """Features and use measurements for one context and its secrets.

    Returns:
        `arm.family` of shape `[rows, layers, reads, dim]`, with one row per secret for `hidden`, `direct` and `masked`,
        and one in all for `before`, `direct restart` and `restart`, which the secret cannot reach; `text.direct` and
        `text.masked`, the tokens that these arms read; and what `use_measurements` gives for `USE_ARMS`.
    """
    variants = Variants.of((conversation(context, text) for text in secrets), model.tokenizer)
    layout = variants.layout
    start, third = layout.part("code").start, layout.span("T3").start
    answer, summary = layout.part("answer"), layout.span("summary2")
    code_tokens, length = answer.stop - answer.start, summary.stop - summary.start

    prefix = model.capture(layout[:start], FAMILIES, segments=["summary1"], keep_cache=True)
    without = conversation(context, secrets[0]).without(*HIDDEN_SEGMENTS).tokens(model.tokenizer)
    restart = model.capture(
        without[: without.part("answer").start], FAMILIES, segments=["summary2", "T3"], keep_cache=True
    )
    again = restart.cache
    assert again is not None

    def read(rows: Sequence[Tokens]) -> tuple[dict[str, Tensor], list[Logits]]:
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
        _, full = model.extend(turn.cache, asked, logits=code_tokens)
        restarted = forced_logits(model, again, restart.logits, [row[answer] for row in rows])
        before = summary.start - start
        tensors = {
            **arm_read_outs("hidden", turn, slice(code_tokens, before)),
            **arm_read_outs("direct", turn, slice(before, None)),
            **arm_read_outs("masked", masked),
        }
        return tensors, [full, masked.logits, restarted]

    return {
        **variants.read(batch, read),
        **arm_read_outs("before", prefix),
        **arm_read_outs("direct restart", restart, slice(length)),
        **arm_read_outs("restart", restart, slice(length, None)),
        "text.direct": torch.tensor(layout.ids[summary]),
        "text.masked": torch.tensor(layout.ids[third : answer.start]),
    }
