"""Every policy at every budget on the cache of the same conversation, and what the model says from what is left.

A conversation is read once, with attention watched, and each condition acts on that cache: the slots left are retained,
never read again. What is said afterwards is teacher-forced, in two passes for each condition: the continuation that the
model itself gives with the full cache, and five questions as rows of one batch. One file per sample is kept, so an
interrupted run resumes.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.footprint import footprint
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.forward import onwards
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import choice_measurements, code_measurements, divergence, logprobs_of
from kvprobe.policies.catalogue import CATALOGUE, WINDOW
from kvprobe.progress import Bar
from kvprobe.studies.policies import Config
from kvprobe.tasks.instructions import Given, conversation, draw, instruction_questions, needle_question
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

CONTINUED = 32
"""Tokens of the model's own continuation."""
LAST_TURN = "Thank you. What would you suggest that I do next?"
NUMBER_BYTES = 2
"""Memory is that of a 16-bit cache, which is what engines hold, whatever the dtype here."""
FULL = "full"


@dataclass(frozen=True)
class Script:
    """What is said after the conversation.

    Attributes:
        continuation: the last turn and the model's own answer to it, but for its last token.
        continued: how many tokens that answer has.
        questions: the needle's, up to the last token of its code, then each instruction's, up to its value.
        codes: the true code's tokens first, then those of the codes that it might have been.
        values: first tokens of each instruction's values.
        prior: log-probability of each with nothing before the question.
        true: which of these values each instruction was given.
    """

    continuation: Tokens
    continued: int
    questions: tuple[Tokens, ...]
    codes: Int[Tensor, "codes code_tokens"]
    values: Int[Tensor, "places values"]
    prior: Float[Tensor, "places values"]
    true: tuple[int, ...]


@dataclass(frozen=True)
class Said:
    """Logits on the script: at each token of the continuation, and at the last ones of each question."""

    continuation: Float[Tensor, "continued vocab"]
    answers: Float[Tensor, "questions code_tokens vocab"]


def conditions(config: Config) -> list[tuple[str, int]]:
    """All conditions but the full cache: a policy's name, and its budget in percent of the slots or its bits."""
    return [(name, level) for name, policy in CATALOGUE.items() for level in policy.bits or config.budgets]


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """The rows of all samples (see `read_sample`), in order."""
    parts, samples = Parts(model, config, run), range(config.samples)
    return parts.table(read_sample, samples, "sample", doing="Evicting and asking", unit="conversation")


def read_sample(model: Model, config: Config, sample: int) -> pd.DataFrame:
    """One row per condition, the full cache first.

    Columns: `memory` (share of the full cache's), `bytes` (as a 16-bit cache) and `bytes_held` (by kvprobe); `kl` in
    nats and `agreement` of the most likely token, means over the continuation; `code` (share of its tokens that are the
    most likely ones) and `code_margin` (their log-probability less the mean over other digits, in nats, summed);
    `instruction1` … (whether the true value gained most of the eight over their log-probabilities with nothing before
    the question), their mean `instructions` and `instruction_margin` (that gain less the mean over the others, in nats,
    mean of the four).
    """
    given, chat = sample_conversation(model, config, sample)
    tokens = chat.tokens(model.tokenizer)
    scene = replace(model.watch(chat, queries=WINDOW), samples=(sample,))
    script = write_script(model, scene.cache, given, chat)
    full = say(model, scene.cache, script)
    known = {
        "sample": sample,
        "slots": len(tokens),
        "depth": tokens.part("code").start / len(tokens),
        "code_text": given.code,
        "instruction_ids": ", ".join(instruction.id for instruction, _ in given.instructions),
        "reach": len(tokens) + max(map(len, (script.continuation, *script.questions))),
        "continued": script.continued,
        "code_tokens": script.codes.shape[1],
    }
    whole = footprint(scene.cache.ledger, scene.cache.shape, NUMBER_BYTES)

    def row(kind: str, level: int, cache: KVCache, said: Said) -> dict[str, Any]:
        taken = footprint(cache.ledger, cache.shape, NUMBER_BYTES)
        memory = {"memory": taken / whole, "bytes": taken, "bytes_held": cache.nbytes}
        condition = {"condition": kind if kind == FULL else f"{kind}-{level}", "kind": kind, "level": level}
        return known | condition | memory | outcomes_of(script, said, full)

    rows = [row(FULL, 100, scene.cache, full)]
    for kind, level in Bar(conditions(config), desc="Policies", unit="condition", leave=False):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* has changed nothing")  # of budgets into which all fits
            cache = model.apply(CATALOGUE[kind].at(level, len(tokens), config.seed), scene)
        rows.append(row(kind, level, cache, say(model, cache, script)))
    return pd.DataFrame(rows)


def sample_conversation(model: Model, config: Config, sample: int) -> tuple[Given, Transcript]:
    """What a sample's conversation holds, and the conversation."""
    # The third number keeps this stream apart from that of random eviction, which draws from [seed, sample].
    given = draw(np.random.default_rng([config.seed, sample, 1]), model.tokenizer)
    return given, conversation(given, config.length, model.tokenizer)


def write_script(model: Model, cache: KVCache, given: Given, chat: Transcript) -> Script:
    """The script of a conversation whose full cache this is.

    Raises:
        UserError: the tokenizer joins a code or value with the text before it, or codes differ in tokens.
    """
    (turn,) = model.prompts(cache, LAST_TURN)
    continued = generate(model.lanes, [turn], cache, max_new_tokens=CONTINUED).tokens[0]
    needle = needle_question(given, chat, model.tokenizer)
    asked = instruction_questions(given, chat, model.tokenizer)
    values = torch.tensor([[answer[0] for answer in question.answers] for question in asked], device=model.lanes.device)
    _, unasked = model.extend(None, [question.tokens for question in asked])
    return Script(
        continuation=turn.answered(continued),
        continued=len(continued),
        questions=(needle.tokens.answered(needle.answers[0]), *(question.tokens for question in asked)),
        codes=torch.tensor(needle.answers, device=model.lanes.device),
        values=values,
        prior=logprobs_of(unasked[:, -1], values),
        true=tuple(question.true for question in asked),
    )


def say(model: Model, cache: KVCache, script: Script) -> Said:
    """The script read on after a cache, from where its positions end."""
    # Apart, because each row of a pass is charged for the longest.
    _, continuation = model.extend(cache, onwards(cache, [script.continuation]), logits=script.continued)
    _, answers = model.extend(cache, onwards(cache, script.questions), logits=script.codes.shape[1])
    return Said(continuation[0], answers)


def outcomes_of(script: Script, said: Said, full: Said) -> dict[str, float]:
    """The measures of one condition; see `read_sample`."""
    kl, agreement = divergence(full.continuation, said.continuation)
    code = code_measurements(said.answers[:1], script.codes, [0])
    instructions = choice_measurements(said.answers[1:, -1], script.values, script.true, script.prior)
    return {
        "kl": float(kl.mean()),
        "agreement": float(agreement.double().mean()),
        "code": float(code["correct"].double().mean()),
        "code_margin": float(code["margin"].sum()),
        "instructions": float(instructions["correct"].double().mean()),
        "instruction_margin": float(instructions["margin"].mean()),
        **{f"instruction{place}": float(right) for place, right in enumerate(instructions["correct"], start=1)},
    }
