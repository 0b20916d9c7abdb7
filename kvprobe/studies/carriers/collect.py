"""Patching between two caches that differ in what their slots have seen, and in nothing else.

A conversation is read up to its cut twice: whole, the hidden turn being dropped afterwards (retained), and without that
turn, at the same positions (recomputed). Both hold the same tokens at the same places. Groups of slots are swapped
from one into the other and a question is read after them. A third cache is retained of a conversation with another code
in the hidden turn. One table per conversation is kept, so an interrupted run resumes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.faults.scope import named_bands
from kvprobe.inference.model import Model
from kvprobe.patching import KL, Cell, LogitDiff, LogProb, Metric, aligned
from kvprobe.patching.metrics import measured
from kvprobe.patching.reader import Reader
from kvprobe.studies.carriers import Config
from kvprobe.studies.carriers.groups import HIDDEN, cells, code_cells, groups, token_cells
from kvprobe.tasks.compaction import Compaction, compacted_conversation, compactions
from kvprobe.tasks.passcode import Context, contexts, draw_codes
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

QUESTIONS = ("hidden", "summary")
"""Where the answer stands: in the hidden turn alone, or in a summary before it."""
DIRECTIONS = ("restoring", "removing")
"""Into the recomputed cache from the retained one, or the other way."""
CODES = "two codes"
SPARE = 64
"""Codes that are there to be the other one; among so many, some begin with another digit."""
Metrics = Callable[[Float[Tensor, "kept vocab"]], Mapping[str, Metric]]
"""What is measured, once the donor's own logits are known."""


@dataclass(frozen=True)
class Asked:
    """A question to be read after the cut, with its answer but for the last token.

    Attributes:
        kept: tokens of the reply, each of which is predicted.
        answer: the reply's last tokens, which answer the question.
    """

    suffix: Tokens
    kept: int
    answer: tuple[int, ...]


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """The tables of all conversations (see `read_context`), one after the other; `context` is their number."""
    conversations = list(zip(contexts(), compactions(), strict=True))[: config.contexts]
    codes = draw_codes(config.contexts + SPARE, np.random.default_rng([config.seed, 1]), model.tokenizer)

    def read(number: int) -> pd.DataFrame:
        code, spare = codes[number], codes[config.contexts + number :]
        # Another first digit, so that one token tells the two codes apart.
        other = next(candidate for candidate in spare if candidate[0] != code[0])
        table = read_context(model, *conversations[number], (code, other), config, example=number == 0)
        return table.assign(context=number)

    return table_of_parts(run, range(config.contexts), "patched", read, doing="Patching conversations", unit="pair")


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
        `full` (with everything in view), `right` (whether the reply is then foretold token by token), and `apart`, how
        far the two caches' K and V differ before the hidden turn, relative to the largest.
    """
    chat, other = (compacted_conversation(context, compaction, code) for code in codes)
    whole, swapped = (talk.tokens(model.tokenizer) for talk in (chat, other))
    cut = whole.span("ask").start
    full, full_other = (model.prefill(tokens[:cut]) for tokens in (whole, swapped))
    retained, retained_other = full.evict(HIDDEN), full_other.evict(HIDDEN)
    gone = chat.without(HIDDEN).tokens(model.tokenizer)
    recomputed = model.prefill(gone[: gone.span("ask").start])

    slots, layers = groups(retained.ledger), named_bands(model.geometry.n_layers, config.bands)
    tables = []
    for question in QUESTIONS:
        asked = ask(model, chat, context, compaction, codes[0], question)
        metrics = _against_donor(asked)
        for direction, (base, donor) in zip(DIRECTIONS, ((recomputed, retained), (retained, recomputed)), strict=True):
            wanted = cells(slots, layers)
            if example and (question, direction) == (QUESTIONS[0], DIRECTIONS[0]):
                wanted += token_cells(slots["all after"], layers)
            table = swaps(model, full, base, donor, asked, wanted, metrics)
            tables.append(table.assign(question=question, direction=direction, apart=_apart(base, donor, slots)))

    asked = ask(model, chat, context, compaction, codes[0], QUESTIONS[0])
    about = Asked(asked.suffix[: len(asked.suffix) - len(asked.answer) + 1], 1, asked.answer[:1])
    first = ask(model, other, context, compaction, codes[1], QUESTIONS[0]).answer[0]
    difference = LogitDiff(asked.answer[0], first)
    table = swaps(
        model, full, retained, retained_other, about, code_cells(slots, layers), lambda _: {"logit_diff": difference}
    )
    with_other = float(difference(_said(model, full_other, about)))
    apart = _apart(retained, retained_other, slots)
    tables.append(table.assign(question=CODES, direction=CODES, full_other=with_other, apart=apart))
    return pd.concat(tables, ignore_index=True)


def ask(model: Model, chat: Transcript, context: Context, compaction: Compaction, code: str, question: str) -> Asked:
    """A question after the conversation's cut, with its reply."""
    kept = [message for message in chat.messages if message.segment != "ask"]
    user, lead, answer = (
        (context.question, [{"text": context.answer + " ", "name": "lead"}], code)
        if question == "hidden"
        else (compaction.summary_question, [], compaction.summary_answer)
    )
    messages = [
        *({"role": message.role, "content": message.text} for message in kept),
        {"role": "user", "content": user},
        {"role": "assistant", "content": [*lead, {"text": answer, "name": "answer"}]},
    ]
    tokens = Transcript.from_messages(messages, [*(message.segment for message in kept), "ask", "ask"]).tokens(
        model.tokenizer
    )
    span = tokens.part("answer")
    reply = tokens.part("lead").start if lead else span.start
    return Asked(tokens[tokens.span("ask").start : span.stop - 1], span.stop - reply, tokens.ids[span])


def swaps(
    model: Model, full: KVCache, base: KVCache, donor: KVCache, asked: Asked, wanted: Sequence[Cell], metrics: Metrics
) -> pd.DataFrame:
    """The metrics with each cell of the base swapped for the donor's, one row for each; see `read_context`."""
    theirs, everything = (_said(model, cache, asked) for cache in (donor, full))
    measures = metrics(theirs)
    others = {"full": aligned(model.lanes, base, donor).cache, "self": base}
    reader = Reader(model.lanes, base, others, asked.suffix)
    order = sorted(wanted, key=lambda cell: cell.layers[0])
    values = [_values(measures, row) for logits in reader.passes(order, asked.kept) for row in logits]
    last = everything[-len(asked.answer) :]
    right = bool((last.argmax(-1) == torch.tensor(asked.answer, device=last.device)).all())
    ends, aims = _values(measures, theirs), _values(measures, everything)
    names = [model.tokenizer.decode([token]) for token in base.ledger.tokens[0].tolist()]
    table = pd.DataFrame(
        {
            **{"slot": -1, **cell.labels},
            "part": cell.part,
            "slots": len(cell.slots),
            "token": names[cell.slots[0]] if "slot" in cell.labels else "",
            "metric": metric,
            "value": value[metric],
            "base": values[0][metric],
            "donor": ends[metric],
            "full": aims[metric],
            "right": right,
        }
        for cell, value in zip(order, values[1:], strict=True)
        for metric in measures
    )
    return table.assign(effect=table["value"] - table["base"], way=table["donor"] - table["base"])


def _against_donor(asked: Asked) -> Metrics:
    """KL(donor ‖ patched) over the reply, and log p of its answer."""
    likely = LogProb(asked.answer)

    def metrics(donor: Tensor) -> Mapping[str, Metric]:
        return {"kl": KL(asked.kept).to(donor), "logprob": lambda logits: likely(logits[-likely.kept :])}

    return metrics


def _said(model: Model, cache: KVCache, asked: Asked) -> Float[Tensor, "kept vocab"]:
    return Reader(model.lanes, cache, {}, asked.suffix).logits([], asked.kept)[0]


def _values(metrics: Mapping[str, Metric], logits: Float[Tensor, "kept vocab"]) -> dict[str, float]:
    return {name: float(measured(metric, logits)) for name, metric in metrics.items()}


def _apart(one: KVCache, other: KVCache, slots: Mapping[str, tuple[int, ...]]) -> float:
    """The largest difference of K or V in slots before the hidden turn, relative to the largest of K or V."""
    before = list(slots["before"])
    return max(
        float((a[:, :, before] - b[:, :, before]).abs().max() / a.abs().max())
        for a, b in zip((*one.keys, *one.values), (*other.keys, *other.values), strict=True)
    )
