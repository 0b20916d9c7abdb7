"""The same summaries, read with other turns in view, which are then hidden; and what is answered from them.

What a summary states is asked for, at once or some exchanges later. The turns that it was read after state it too
(`own`), state it in other words (`reworded`), state another answer in its place (`other`), or speak of something else
(`unrelated`). The words of the summary are the same in all four. Where the turns stated it too, K or V of the retained
summaries is then exchanged for what was computed again, a band of layers at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

import pandas as pd
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.faults.scope import named_bands
from kvprobe.inference.forward import onwards
from kvprobe.inference.model import Model
from kvprobe.patching.metrics import LogProb
from kvprobe.patching.patch_sweep import patch_sweep
from kvprobe.policies import RestartInPlace
from kvprobe.studies.compaction.arms import HIDDEN_SEGMENTS
from kvprobe.studies.compaction.replies import answers_after, read_on
from kvprobe.studies.reliance import Config, Lead
from kvprobe.studies.reliance.stated_twice import LEAD, Stated, StatedTwice, Word, stated_twice
from kvprobe.tasks.compaction import unrelated
from kvprobe.tasks.passcode import contexts
from kvprobe.text.tokens import Tokens

LONGEST_LEAD = 32
"""Tokens of a reply in which the answer is looked for."""
EXCHANGED = ("K", "V", "KV")
WORDS: tuple[Word, ...] = ("own", "other")
Source = Literal["own", "reworded", "other", "unrelated"]
STATED: dict[Source, Stated] = {"own": "own", "reworded": "reworded", "other": "other", "unrelated": "own"}
"""What the turns state before those of `unrelated` are replaced, token by token."""
States = Mapping[str, KVCache]


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Three tables, with so many `turns` between the summaries and the question.

    `samples`: `logprob` of each answer (`word`) after a `lead`, in nats, by what was in view (`source`) and what was
    done about it (`state`): nothing (`view`), the turns masked (`retained`), or the summaries computed again
    (`recomputed`). `replies`: whether the model's own reply is `right`, where the turns stated the answer or spoke of
    something else. `exchanged`: the summary's answer, where the turns stated it too, at once and as soon as turns lie
    between, by `band` and `part`: `undone` is what the exchange adds to it.
    """
    cases, doing, unit = stated_twice(config.contexts), "Asking after summaries", "conversation"
    rows = Parts(model, config, run).table(measure, cases, "answers", doing=doing, unit=unit)
    columns = {
        "samples": ["logprob", "source", "state", "word", "turns", "lead", "words", "context"],
        "replies": ["right", "source", "state", "turns", "context"],
        "exchanged": ["undone", "band", "part", "turns", "lead", "context"],
    }
    return {name: rows.loc[rows[kept[0]].notna(), kept].reset_index(drop=True) for name, kept in columns.items()}


def measure(model: Model, config: Config, case: StatedTwice) -> pd.DataFrame:
    """The rows of the three tables of one conversation."""
    bands = named_bands(model.geometry.n_layers, config.bands)
    leads: dict[tuple[int, Lead], str] = {}
    rows: list[dict[str, Any]] = []
    swept = {0, min(turns for turns in config.turns if turns)}
    for source in get_args(Source):
        states = states_of(model, case, source)
        caches, read = KVCache.join(list(states.values())), 0
        for turns in config.turns:
            tokens = case.talk(STATED[source], None, turns).tokens(model.tokenizer, generation_prompt=True)
            onward = tokens[tokens.span("summary2").stop :]
            ask = onward.span("ask").start
            caches, read = read_on(model, caches, onward[read:ask]), ask
            question = onward[ask:]
            if source == "own":
                leads |= {(turns, lead): lead_of(model, case, caches, question, lead) for lead in config.leads}
            for lead in config.leads:
                cell = {"turns": turns, "lead": lead}
                asking = {word: AskedAfter.of(model, case, source, word, turns, leads[turns, lead]) for word in WORDS}
                for word, asked in asking.items():
                    row = {**cell, "source": source, "word": word, "words": leads[turns, lead]}
                    worth = asked.worth(model, caches, ask)
                    rows += (
                        {**row, "state": state, "logprob": nats} for state, nats in zip(states, worth, strict=True)
                    )
                if source == "own" and lead == "model" and turns in swept:
                    undone = exchanged(model, states, asking["own"], bands)
                    rows += (
                        {**cell, "band": band, "part": part, "undone": nats} for (band, part), nats in undone.items()
                    )
            if source in ("own", "unrelated"):
                right = answers_rightly(model, case, caches, question, config.answer)
                cell = {"turns": turns, "source": source}
                rows += ({**cell, "state": state, "right": one} for state, one in zip(states, right, strict=True))
    return pd.DataFrame(rows).assign(context=contexts().index(case.context))


@dataclass(frozen=True)
class AskedAfter:
    """What is read after the summaries, up to the answer, and the tokens of the answer."""

    prompt: Tokens
    answer: tuple[int, ...]

    @classmethod
    def of(cls, model: Model, case: StatedTwice, source: Source, word: Word, turns: int, lead: str) -> "AskedAfter":
        tokens = case.talk(STATED[source], word, turns, lead).tokens(model.tokenizer)
        answer = tokens.part("answer")
        return cls(tokens[tokens.span("summary2").stop : answer.start], tokens.ids[answer])

    @property
    def read(self) -> Tokens:
        """With the answer but for its last token, whose probability is read off the token before it."""
        return self.prompt + Tokens.of(self.answer[:-1], "answer", self.prompt.following)

    def worth(self, model: Model, caches: KVCache, start: int) -> list[float]:
        """The log-probability of the answer after each row of a cache that holds the first `start` of these tokens."""
        rows = onwards(caches, [self.read[start:]])
        log_probs = model.extend(caches, rows, logits=len(self.answer))[1].double().log_softmax(-1)
        answer = torch.tensor(self.answer, device=log_probs.device)
        return log_probs.gather(-1, answer[None, :, None].expand(len(log_probs), -1, -1)).sum((1, 2)).tolist()


def states_of(model: Model, case: StatedTwice, source: Source) -> States:
    """The conversation up to its second summary: with its turns in view, masked, and with the summaries computed
    again."""
    read = case.before(STATED[source]).tokens(model.tokenizer)
    if source == "unrelated":
        number = contexts().index(case.context)
        others = contexts()[number + 1 :] + contexts()[:number]
        read = unrelated(read, HIDDEN_SEGMENTS, others, model.tokenizer)
    cache = model.prefill(read)
    recomputed = model.apply(RestartInPlace(HIDDEN_SEGMENTS), cache)
    return {"view": cache, "retained": cache.mask(*HIDDEN_SEGMENTS), "recomputed": recomputed}


def exchanged(
    model: Model, states: States, asked: AskedAfter, bands: Mapping[str, Sequence[int]]
) -> dict[tuple[str, str], float]:
    """What the answer gains, in nats, where K or V of a band of layers is that of the recomputed summaries."""
    metric, over = LogProb.of(asked.answer), {"band": list(bands.values())}
    caches = states["retained"], states["recomputed"]
    swept = patch_sweep(model, *caches, asked.read, metric, over, parts=EXCHANGED, progress=False)
    return dict(zip(product(bands, EXCHANGED), swept.effect.tolist(), strict=True))


def answers_rightly(model: Model, case: StatedTwice, caches: KVCache, question: Tokens, length: int) -> list[float]:
    """Whether the model's greedy answer after each row holds the right words, as 0 or 1."""
    said = answers_after(model, caches, [question], length)
    return [float(case.answers["own"].lower() in text.lower()) for text in said.texts]


def lead_of(model: Model, case: StatedTwice, caches: KVCache, question: Tokens, lead: Lead) -> str:
    """The words before the answer: the model's own with everything in view (the first row), if it answers rightly then;
    or ours."""
    if lead == "ours":
        return LEAD
    (said,) = answers_after(model, caches.rows([0]), [question], LONGEST_LEAD).texts
    before, answer, _ = said.partition(case.answers["own"])
    return before.strip() if answer and before.strip() else LEAD
