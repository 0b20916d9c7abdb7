"""The same summaries, read with other turns in view, which are then hidden; and what is answered from them.

What a summary states is asked for. The turns that it was read after state it too (`own`), state another answer in
its place (`other`), or speak of something else (`unrelated`). The words of the summary are the same in all three.
Where the turns stated it too, K or V of the retained summaries is then exchanged for what was computed again, a band of
layers at a time.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Literal, get_args

import pandas as pd

from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.faults.scope import named_bands
from kvprobe.inference.forced import given_answer
from kvprobe.inference.model import Model
from kvprobe.patching.metrics import LogProb
from kvprobe.patching.patch_sweep import patch_sweep
from kvprobe.policies import RestartInPlace
from kvprobe.studies.compaction.arms import HIDDEN_SEGMENTS
from kvprobe.studies.reliance import Config
from kvprobe.studies.reliance.stated_twice import LEAD, StatedTwice, Word, stated_twice
from kvprobe.tasks.compaction import unrelated
from kvprobe.tasks.passcode import contexts
from kvprobe.text.transcript import Transcript

LONGEST_LEAD = 32
"""Tokens of a reply in which the answer is looked for."""
EXCHANGED = ("K", "V", "KV")
Source = Literal["own", "other", "unrelated"]


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Two tables of log-probabilities, in nats.

    `samples`: `logprob` of each answer (`word`), by what was in view (`source`) and what was done about it (`state`):
    nothing (`view`), the turns masked (`retained`), or the summaries computed again (`recomputed`). `exchanged`: the
    summary's answer, where the turns stated it too, by `band` and `part`: `undone` is what the exchange adds to it.
    """
    bands = named_bands(model.geometry.n_layers, config.bands)
    cases, doing, unit = stated_twice(config.contexts), "Asking after summaries", "conversation"
    measured = partial(measure, model, bands, config)
    rows = table_of_parts(run, cases, "answers", measured, doing=doing, unit=unit)
    whole = rows["band"].isna()
    samples = rows.loc[whole, ["source", "state", "word", "logprob", "context", "lead"]].reset_index(drop=True)
    return {"samples": samples, "exchanged": rows.loc[~whole, ["band", "part", "undone", "context"]]}


def measure(model: Model, bands: Mapping[str, Sequence[int]], config: Config, case: StatedTwice) -> pd.DataFrame:
    """The rows of both tables of one conversation."""
    lead = lead_of(model, case, config)
    number = contexts().index(case.context)
    others = contexts()[number + 1 :] + contexts()[:number]
    rows = []
    for source in get_args(Source):
        turns = "other" if source == "other" else "own"
        whole = {word: case.talk(turns, word, config.turns, lead).tokens(model.tokenizer) for word in get_args(Word)}
        ask, begins = whole["own"].span("B1" if config.turns else "ask").start, whole["own"].part("answer").start
        read = whole["own"][:ask]
        cache = model.prefill(
            unrelated(read, HIDDEN_SEGMENTS, others, model.tokenizer) if source == "unrelated" else read
        )
        states = {
            "view": cache,
            "retained": cache.mask(*HIDDEN_SEGMENTS),
            "recomputed": model.apply(RestartInPlace(HIDDEN_SEGMENTS), cache),
        }
        for state, left in states.items():
            for word, tokens in whole.items():
                answer = tokens.ids[begins : tokens.part("answer").stop]
                logprob = given_answer(model, left, tokens[ask:begins], answer).log_prob
                rows.append({"source": source, "state": state, "word": word, "logprob": logprob})
        if source == "own":
            answer = whole["own"].part("answer")
            metric, asked = LogProb.of(whole["own"].ids[answer]), whole["own"][ask : answer.stop - 1]
            caches, over = (states["retained"], states["recomputed"]), {"band": list(bands.values())}
            swept = patch_sweep(model, *caches, asked, metric, over, parts=EXCHANGED, progress=False)
            for (band, part), undone in zip(product(bands, EXCHANGED), swept.effect.tolist(), strict=True):
                rows.append({"band": band, "part": part, "undone": undone})
    return pd.DataFrame(rows).assign(context=number, lead=lead)


def lead_of(model: Model, case: StatedTwice, config: Config) -> str:
    """The words before the answer: the model's own with everything in view, if it answers rightly then; or ours."""
    if config.lead == "ours":
        return LEAD
    asking = Transcript(case.talk("own", "own", config.turns).messages[:-1])
    before, answer, _ = model.generate(asking, max_new_tokens=LONGEST_LEAD).text.partition(case.answers["own"])
    return before.strip() if answer and before.strip() else LEAD
