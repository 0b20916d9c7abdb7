"""The same summaries, read with other turns in view, which are then hidden; and what is answered from them.

What a summary states is asked for. The turns that it was read after state it too (`own`), state another answer in
its place (`other`), or speak of something else (`unrelated`). The words of the summary are the same in all three.
"""

from typing import Literal, get_args

import pandas as pd

from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.forced import given_answer
from kvprobe.inference.model import Model
from kvprobe.policies import RestartInPlace
from kvprobe.studies.compaction.arms import HIDDEN_SEGMENTS
from kvprobe.studies.reliance import Config
from kvprobe.tasks.compaction import unrelated
from kvprobe.tasks.passcode import contexts
from kvprobe.tasks.stated_twice import StatedTwice, Word, stated_twice

Source = Literal["own", "other", "unrelated"]


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """Rows of `logprob`, in nats, of each answer (`word`), by what was in view (`source`) and what was done about it
    (`state`): nothing (`view`), the turns masked (`retained`), or the summaries computed again (`recomputed`)."""
    cases = stated_twice(config.contexts)
    doing, unit = "Asking after summaries", "conversation"
    return table_of_parts(run, cases, "answers", lambda case: measure(model, case), doing=doing, unit=unit)


def measure(model: Model, case: StatedTwice) -> pd.DataFrame:
    number = contexts().index(case.context)
    others = contexts()[number + 1 :] + contexts()[:number]
    rows = []
    for source in get_args(Source):
        turns = "other" if source == "other" else "own"
        whole = {word: case.talk(turns, word).tokens(model.tokenizer) for word in get_args(Word)}
        ask, begins = whole["own"].span("ask").start, whole["own"].part("answer").start
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
    return pd.DataFrame(rows).assign(context=number)
