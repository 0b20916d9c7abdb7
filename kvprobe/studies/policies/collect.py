"""Every policy at every budget on the cache of the same conversation, and what the model says from what is left.

A conversation is read once, with attention watched, and each condition acts on that cache: the slots left are retained,
never read again. What is said afterwards is teacher-forced, in two passes for each condition: the continuation that the
model itself gives with the full cache, and five questions as rows of one batch. One file per sample is kept, so an
interrupted run resumes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.footprint import footprint
from kvprobe.errors import UserError
from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.forward import onwards
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import divergence, use_measurements
from kvprobe.policies import (
    H2O,
    TOVA,
    HeadBudgets,
    LayerBudgets,
    Policy,
    Quantise,
    RandomEviction,
    SinkWindow,
    SlidingWindow,
    SnapKV,
)
from kvprobe.progress import Bar
from kvprobe.studies.policies import Config
from kvprobe.tasks.instructions import PLACES, Given, asked, conversation, draw
from kvprobe.text.messages import Message, Part
from kvprobe.text.tokens import GENERATED, Tokens
from kvprobe.text.transcript import Transcript

SINKS, WINDOW, TAIL = 4, 16, 32
"""Slots at the start that sink windows keep, last queries that SnapKV looks at, and slots that stay unquantised."""
CONTINUED = 32
"""Tokens of the model's own continuation."""
LAST_TURN = "Thank you. What would you suggest that I do next?"
NUMBER_BYTES = 2
"""Memory is that of a 16-bit cache, which is what engines hold, whatever the dtype here."""
FULL, RANDOM, RANDOM_SINKS = "full", "random", "random-sinks"


@dataclass(frozen=True)
class Room:
    """What a policy is given: `amount` is slots to keep (or bits, where the kind says so)."""

    amount: int
    seed: int


@dataclass(frozen=True)
class Kind:
    """A policy at all its budgets: one line of a figure.

    Attributes:
        label: as reports and figures call it.
        make: the policy for a room.
        colour: colour, marker and dashes of its line.
        bits: amounts that it is measured at instead of budgets, where it keeps all slots.
        rounds: whether it changes numbers, so that it is not the full cache even if it keeps every slot.
        baseline: whether it knows nothing of what it evicts, and is there for others to be held against.
    """

    label: str
    make: Callable[[Room], Policy]
    colour: str
    marker: str
    dashes: str = "-"
    bits: tuple[int, ...] = ()
    rounds: bool = False
    baseline: bool = False


def _snapkv(room: Room) -> SnapKV:
    # Below two windows of budget, a window may take half of it.
    return SnapKV(room.amount, window=min(WINDOW, room.amount // 2))


def _sinks(room: Room) -> SinkWindow:
    return SinkWindow(SINKS, room.amount - SINKS)


KINDS = {
    "sliding": Kind("sliding window", lambda room: SlidingWindow(room.amount), "#56b4e9", "v"),
    "sinks": Kind("sinks + window (StreamingLLM)", _sinks, "#0072b2", "o"),
    "sinks-gapped": Kind(
        "sinks + window (gapped)", lambda room: replace(_sinks(room), mode="gapped"), "#0072b2", "s", "--"
    ),
    RANDOM: Kind("random eviction", lambda room: RandomEviction(room.amount, room.seed), "#7f7f7f", "x", baseline=True),
    "random-heads": Kind(
        "random eviction per head",
        lambda room: RandomEviction(room.amount, room.seed, per_head=True),
        "#7f7f7f",
        "+",
        "--",
        baseline=True,
    ),
    RANDOM_SINKS: Kind(
        "random eviction + sinks",
        lambda room: RandomEviction(room.amount, room.seed, sinks=SINKS),
        "#7f7f7f",
        "o",
        ":",
        baseline=True,
    ),
    "h2o": Kind("H2O", lambda room: H2O(room.amount), "#009e73", "^"),
    "tova": Kind("TOVA", lambda room: TOVA(room.amount), "#cc79a7", "D"),
    "snapkv": Kind("SnapKV", _snapkv, "#d55e00", "o"),
    "pyramidkv": Kind("PyramidKV", lambda room: LayerBudgets(_snapkv(room)), "#d55e00", "s", "--"),
    "adakv": Kind("Ada-KV (SnapKV)", lambda room: HeadBudgets(_snapkv(room)), "#d55e00", "^", ":"),
    "quantise": Kind(
        "quantised (8 to 2 bits)",
        lambda room: Quantise(room.amount, tail=TAIL),
        "#000000",
        "*",
        "",
        bits=(8, 4, 3, 2),
        rounds=True,
    ),
    "sinks-quantised": Kind(
        "sinks + window at 4 bits", lambda room: _sinks(room) | Quantise(4, tail=TAIL), "#e69f00", "P", rounds=True
    ),
}
"""Every policy of the study by name. To add one, add an entry."""


@dataclass(frozen=True)
class Condition:
    """A kind of policy at a level: a budget in percent of the conversation's slots, or bits."""

    kind: str
    level: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.level}"

    def policy(self, slots: int, seed: int) -> Policy:
        """The policy for a conversation of so many slots."""
        kind = KINDS[self.kind]
        amount = self.level if kind.bits else round(self.level * slots / 100)
        return kind.make(Room(amount, seed))


def conditions(config: Config) -> list[Condition]:
    """All conditions but the full cache, kind by kind."""
    return [Condition(name, level) for name, kind in KINDS.items() for level in kind.bits or config.budgets]


@dataclass(frozen=True)
class Script:
    """What is said after the conversation, each row beginning at position 0.

    Attributes:
        continuation: the last turn and the model's own answer to it, but for its last token.
        continued: how many tokens that answer has.
        questions: the needle's, up to the last token of its code, then each instruction's, up to its value.
        codes: the true code's tokens first, then those of nine codes whose digits are other ones at each place.
        values: first tokens of each instruction's values.
        prior: log-probability of each with nothing before the question, which tells what words the model likes anyway.
        chosen: which of these values each instruction was given.
    """

    continuation: Tokens
    continued: int
    questions: tuple[Tokens, ...]
    codes: Int[Tensor, "codes code_tokens"]
    values: Int[Tensor, "places values"]
    prior: Float[Tensor, "places values"]
    chosen: tuple[int, ...]


@dataclass(frozen=True)
class Said:
    """Logits on the script: at each token of the continuation, and at the last ones of each question."""

    continuation: Float[Tensor, "continued vocab"]
    answers: Float[Tensor, "questions code_tokens vocab"]


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """The rows of all samples (see `read_sample`), in order."""

    def read(sample: int) -> pd.DataFrame:
        return read_sample(model, config, sample)

    samples = range(config.samples)
    return table_of_parts(run, samples, "sample", read, doing="Evicting and asking", unit="conversation")


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

    def row(name: str, kind: str, level: int, cache: KVCache, said: Said) -> dict[str, Any]:
        taken = footprint(cache.ledger, cache.shape, NUMBER_BYTES)
        memory = {"memory": taken / whole, "bytes": taken, "bytes_held": cache.nbytes}
        condition = {"condition": name, "kind": kind, "level": level}
        return known | condition | memory | outcomes_of(script, said, full)

    rows = [row(FULL, FULL, 100, scene.cache, full)]
    for condition in Bar(conditions(config), desc="Policies", unit="condition", leave=False):
        cache = model.apply(condition.policy(len(tokens), config.seed), scene)
        rows.append(row(condition.name, condition.kind, condition.level, cache, say(model, cache, script)))
    return pd.DataFrame(rows)


def sample_conversation(model: Model, config: Config, sample: int) -> tuple[Given, Transcript]:
    """What a sample's conversation holds, and the conversation."""
    # The third number keeps this stream apart from that of random eviction, which draws from [seed, sample].
    given = draw(np.random.default_rng([config.seed, sample, 1]), model.tokenizer)
    return given, conversation(given, config.length, model.tokenizer)


def say(model: Model, cache: KVCache, script: Script) -> Said:
    """The script read on after a cache, from where its positions end."""
    # Apart, because each row of a pass is charged for the longest.
    _, continuation = model.extend(cache, onwards(cache, [script.continuation]), logits=script.continued)
    _, answers = model.extend(cache, onwards(cache, script.questions), logits=script.codes.shape[1])
    return Said(continuation[0], answers)


def outcomes_of(script: Script, said: Said, full: Said) -> dict[str, float]:
    """The measures of one condition; see `read_sample`."""
    kl, agreement = divergence(full.continuation, said.continuation)
    code = use_measurements([said.answers[:1]], script.codes, [0])
    scores = said.answers[1:, -1].float().log_softmax(-1).gather(1, script.values) - script.prior
    chosen = torch.tensor(script.chosen, device=scores.device)
    true = scores.gather(1, chosen[:, None])[:, 0]
    margins = true - (scores.sum(1) - true) / (scores.shape[1] - 1)
    kept = scores.argmax(1) == chosen
    return {
        "kl": float(kl.mean()),
        "agreement": float(agreement.double().mean()),
        "code": float(code["correct"].double().mean()),
        "code_margin": float(code["margin"].sum()),
        "instructions": float(kept.double().mean()),
        "instruction_margin": float(margins.mean()),
        **{f"instruction{place}": float(right) for place, right in enumerate(kept, start=1)},
    }


def write_script(model: Model, cache: KVCache, given: Given, chat: Transcript) -> Script:
    """The script of a conversation whose full cache this is.

    Raises:
        UserError: the tokenizer joins a code or value with the text before it, or codes differ in tokens.
    """
    last = replace(chat, messages=(*chat.messages[-2:], Message("user", (Part(LAST_TURN),), "question")))
    turn = last.tokens(model.tokenizer, generation_prompt=True)
    turn = turn[turn.span("question").start :].shifted(0)
    continued = generate(model.lanes, onwards(cache, [turn]), cache, max_new_tokens=CONTINUED).tokens[0]
    said = Tokens.of(continued[:-1], GENERATED, turn.following)

    def ask(question: str, lead: str, answers: list[str]) -> tuple[Tokens, list[tuple[int, ...]]]:
        """The question up to the answer, and each answer's tokens."""
        rows = [asked(chat, question, lead, answer).tokens(model.tokenizer) for answer in answers]
        places = [row.part("answer") for row in rows]
        leads = {row.ids[: place.start] for row, place in zip(rows, places, strict=True)}
        if len(leads) > 1:
            raise UserError(
                f"This tokenizer joins the answer to {question!r} with the text before it; use another model."
            )
        first = rows[0][rows[0].span("question").start : places[0].start]
        return first.shifted(0), [row.ids[place] for row, place in zip(rows, places, strict=True)]

    shifted = ["".join(str((int(digit) + shift) % 10) for digit in given.code) for shift in range(10)]
    needle, codes = ask(given.needle.question, given.needle.lead, shifted)
    if len({len(code) for code in codes}) > 1:
        raise UserError("This tokenizer joins the digits of some codes; use a model that tokenises digits apart.")
    # The last token of the code is never read: its probability is read off the token before it.
    rows = [needle + Tokens.of(codes[0][:-1], "question", needle.following)]
    values = []
    for instruction, _ in given.instructions:
        question, answers = ask(instruction.query, instruction.lead, list(instruction.values))
        rows.append(question)
        values.append([answer[0] for answer in answers])
    assert len(values) == PLACES
    first = torch.tensor(values, device=model.lanes.device)
    _, unasked = model.extend(None, rows[1:])
    return Script(
        continuation=turn + said,
        continued=len(continued),
        questions=tuple(rows),
        codes=torch.tensor(codes, device=model.lanes.device),
        values=first,
        prior=unasked[:, -1].float().log_softmax(-1).gather(1, first),
        chosen=tuple(instruction.values.index(value) for instruction, value in given.instructions),
    )
