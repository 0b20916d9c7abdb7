"""Patching between two caches that differ in what their slots have seen, and in nothing else.

A conversation is read up to its cut twice: whole, the hidden turn being dropped afterwards (retained), and without that
turn, at the same positions (recomputed). Both hold the same tokens at the same places. Groups of slots are swapped
from one into the other and a question is read after them. A third cache is retained of a conversation with another code
in the hidden turn. One table per conversation is kept, so an interrupted run resumes.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from kvprobe.cache.differences import apart
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.faults.scope import named_bands
from kvprobe.inference.forced import ForcedReply
from kvprobe.inference.model import Model
from kvprobe.patching import KL, LogitDiff, LogProb, suffix_logits, swap_cells
from kvprobe.studies.carriers import Config
from kvprobe.studies.carriers.groups import BEFORE, HIDDEN, cells, code_cells, groups, token_cells
from kvprobe.tasks.compaction import Compaction, asked, compacted_conversation, compactions
from kvprobe.tasks.passcode import Context, contexts, draw_codes
from kvprobe.text.tokens import token_texts
from kvprobe.text.transcript import Transcript

QUESTIONS = ("hidden", "summary")
"""Where the answer stands: in the hidden turn alone, or in a summary before it."""
DIRECTIONS = ("restoring", "removing")
"""Into the recomputed cache from the retained one, or the other way."""
CODES = "two codes"
SPARE = 64
"""Codes that are there to be the other one; among so many, some begin with another digit."""


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """The tables of all conversations (see `read_context`), one after the other; `context` is their number."""
    codes = draw_codes(config.contexts + SPARE, np.random.default_rng([config.seed, 1]), model.tokenizer)
    cases = range(config.contexts)
    return Parts(model, config, run).table(
        measure, cases, "patched", codes, doing="Patching conversations", unit="pair"
    )


def measure(model: Model, config: Config, number: int, codes: Sequence[str]) -> pd.DataFrame:
    """The table of a conversation; its code is one of `codes`, and so is what it is swapped for."""
    context, compaction = contexts()[number], compactions()[number]
    code, spare = codes[number], codes[config.contexts + number :]
    # Another first digit, so that one token tells the two codes apart.
    other = next(candidate for candidate in spare if candidate[0] != code[0])
    table = read_context(model, context, compaction, (code, other), config, example=number == 0)
    return table.assign(context=number)


def read_context(
    model: Model, context: Context, compaction: Compaction, codes: tuple[str, str], config: Config, example: bool
) -> pd.DataFrame:
    """Every swap in one conversation.

    Args:
        codes: the one that the hidden turn holds, and another of as many tokens.
        example: whether each slot after the hidden turn is swapped by itself, too.

    Returns:
        One row per `question`, `direction`, `metric` and cell: its `group`, `band`, `part`, `slots` (how many), `slot`
        and `token` (of a single one), `value`, `effect`, and of the question `base`, `donor`, `way` (donor − base),
        `full` (with everything in view; not of KL), `right` (1 if the answer is then predicted token by token), and
        `apart`, how far the two caches' K and V differ before the hidden turn, relative to the largest.
    """
    chat, other = (compacted_conversation(context, compaction, code) for code in codes)
    whole, swapped = (talk.tokens(model.tokenizer) for talk in (chat, other))
    cut = whole.span("ask").start
    full, full_other = (model.prefill(tokens[:cut]) for tokens in (whole, swapped))
    retained, retained_other = full.evict(HIDDEN), full_other.evict(HIDDEN)
    gone = chat.without(HIDDEN).tokens(model.tokenizer)
    recomputed = model.prefill(gone[: gone.span("ask").start])

    slots, layers = groups(gone), named_bands(model.geometry.n_layers, config.bands)
    tables = []
    for question in QUESTIONS:
        reply = ask(model, chat, context, compaction, codes[0], question)
        answer = LogProb(reply.answer)
        in_view = suffix_logits(model, full, reply.suffix, reply.kept)[-answer.kept :]
        right = in_view.argmax(-1).tolist() == list(reply.answer)
        for direction, (base, donor) in zip(DIRECTIONS, ((recomputed, retained), (retained, recomputed)), strict=True):
            wanted = cells(slots, layers)
            if example and (question, direction) == (QUESTIONS[0], DIRECTIONS[0]):
                wanted += token_cells(slots["all after"], layers)
            metrics = {"kl": KL(reply.kept), "logprob": answer}
            table = swap_cells(model, base, donor, reply.suffix, wanted, metrics)
            table = table.assign(question=question, direction=direction, apart=apart(base, donor, slots[BEFORE]))
            tables.append(table.assign(full=float(answer(in_view)), right=float(right)))

    mine, theirs = (
        ask(model, talk, context, compaction, code, QUESTIONS[0])
        for talk, code in zip((chat, other), codes, strict=True)
    )
    # Up to the code, whose first token distinguishes the two.
    suffix, difference = mine.suffix[: 1 - len(mine.answer) or None], LogitDiff(mine.answer[0], theirs.answer[0])
    metrics = {"logit_diff": difference}
    table = swap_cells(model, retained, retained_other, suffix, code_cells(slots, layers), metrics)
    own, others = (float(difference(suffix_logits(model, cache, suffix, 1))) for cache in (full, full_other))
    table = table.assign(question=CODES, direction=CODES, apart=apart(retained, retained_other, slots[BEFORE]))
    rows = pd.concat([*tables, table.assign(full=own, full_other=others)], ignore_index=True)
    texts = token_texts(retained.ledger.tokens[0].tolist(), model.tokenizer)
    return rows.assign(token=[texts[slot] if slot >= 0 else "" for slot in rows["slot"]])


def ask(
    model: Model, chat: Transcript, context: Context, compaction: Compaction, code: str, question: str
) -> ForcedReply:
    """A question after the conversation's cut, with its reply."""
    words = (
        (context.question, code, context.answer)
        if question == "hidden"
        else (compaction.summary_question, compaction.summary_answer)
    )
    return ForcedReply.of(asked(chat, *words).tokens(model.tokenizer), "ask")
