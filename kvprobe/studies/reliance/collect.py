"""The same summaries, read with other turns in view, which are then hidden; and what is answered from them.

What a summary states is asked for. The turns that it was read after state it too (`own`), state another answer in
its place (`other`), or speak of something else (`unrelated`). The words of the summary are the same in all three.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, get_args

import pandas as pd

from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.policies import RestartInPlace
from kvprobe.studies.compaction.arms import HIDDEN_SEGMENTS
from kvprobe.studies.reliance import Config
from kvprobe.tasks.compaction import Compaction, compactions, unrelated
from kvprobe.tasks.passcode import Context, contexts, conversation
from kvprobe.text.transcript import Transcript

Source = Literal["own", "other", "unrelated"]
Word = Literal["own", "other"]
TURNS = ("chat_user", "chat_assistant", "secret_user", "secret_assistant")
"""Of a context, the texts that are hidden."""
CODE, LEAD = "48213", "The answer is"
Case = tuple[Context, Compaction]


def cases_of(config: Config) -> list[Case]:
    """The conversations whose answer is both in the turns and in a summary of them."""
    picked = list(zip(contexts(), compactions(), strict=True))[: config.contexts]
    return [case for case in picked if stated_twice(*case)]


def stated_twice(context: Context, compaction: Compaction) -> bool:
    """Whether the answer is in the turns, from which it can be taken, and in a summary."""
    answer = compaction.summary_answer
    other = " ".join(getattr(stating(context, compaction, "other"), name) for name in TURNS)
    in_turns = compaction.summary_other in other and answer.lower() not in other.lower()
    return in_turns and answer in f"{context.summary_1} {context.summary_2}"


def stating(context: Context, compaction: Compaction, word: Word) -> Context:
    """The context whose turns, but not its summaries, state this answer."""
    if word == "own":
        return context
    old, new = compaction.summary_answer, compaction.summary_other
    texts: Mapping[str, str] = {name: getattr(context, name).replace(old, new) for name in TURNS}
    return replace(context, **texts)


def talk(context: Context, compaction: Compaction, answer: Word) -> Transcript:
    """The conversation up to the second summary, and then the question, answered so in the part `answer`."""
    before = [message for message in conversation(context, CODE).messages if message.segment != "T3"]
    said = compaction.summary_answer if answer == "own" else compaction.summary_other
    turns: list[dict[str, object]] = [{"role": message.role, "content": message.text} for message in before]
    turns.append({"role": "user", "content": compaction.summary_question})
    turns.append({"role": "assistant", "content": [f"{LEAD} ", {"text": said, "name": "answer"}]})
    return Transcript.from_messages(turns, [*(message.segment for message in before), "ask", "ask"])


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """Rows of `logprob`, in nats, of each answer (`word`), by what was in view (`source`) and what was done about it
    (`state`): nothing (`view`), the turns masked (`retained`), or the summaries computed again (`recomputed`)."""
    cases = cases_of(config)
    everything = list(contexts())

    def measured(case: Case) -> pd.DataFrame:
        number = everything.index(case[0])
        filler = everything[number + 1 :] + everything[:number]
        return measure(model, *case, filler).assign(context=number)

    return table_of_parts(run, cases, "answers", measured, doing="Asking after summaries", unit="conversation")


def measure(model: Model, context: Context, compaction: Compaction, filler: list[Context]) -> pd.DataFrame:
    rows = []
    for source in get_args(Source):
        said = stating(context, compaction, "other" if source == "other" else "own")
        whole = {word: talk(said, compaction, word).tokens(model.tokenizer) for word in get_args(Word)}
        ask, begins = whole["own"].span("ask").start, whole["own"].part("answer").start
        read = whole["own"][:ask]
        cache = model.prefill(
            unrelated(read, HIDDEN_SEGMENTS, filler, model.tokenizer) if source == "unrelated" else read
        )
        states = {
            "view": cache,
            "retained": cache.mask(*HIDDEN_SEGMENTS),
            "recomputed": model.apply(RestartInPlace(HIDDEN_SEGMENTS), cache),
        }
        for state, left in states.items():
            for word, tokens in whole.items():
                answer = tokens.ids[begins : tokens.part("answer").stop]
                asked = tokens[ask : begins + len(answer) - 1]
                logits = model.extend(left, [asked], logits=len(answer))[1][0].float().log_softmax(-1)
                chance = sum(float(row[token]) for row, token in zip(logits, answer, strict=True))
                rows.append({"source": source, "state": state, "word": word, "logprob": chance})
    return pd.DataFrame(rows)
