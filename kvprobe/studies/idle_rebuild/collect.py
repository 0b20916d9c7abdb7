"""Reading the sessions: what every run says at every turn, and how far its cache is from the one that was kept.

All runs read the same text, turn by turn, as rows of one batch. A run that is rebuilt before a turn joins them there.
At each turn the runs are held against each other over the scripted reply, and over the replies that two of them would
have given themselves. One file per session is kept, so an interrupted collection resumes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.differences import FAMILIES, relative_distance
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.forward import onwards
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import relative_entropy
from kvprobe.policies import MaskSpans, RestartInPlace, RestartRebuilt
from kvprobe.studies.idle_rebuild import MEASURED, Config
from kvprobe.studies.idle_rebuild.named_rows import NamedRows, read_on
from kvprobe.studies.idle_rebuild.removals import AFTER, REMOVALS, Removal
from kvprobe.tasks.sessions import TURNS, Session, last_of_header, question, sessions
from kvprobe.text.tokens import Tokens
from kvprobe.tidy import crossed

CONTROLS = tuple(turn for turn in MEASURED if turn not in AFTER)
REFERENCES = ("compacted", "kept", "in_place")
SPEAKERS = ("compacted", "kept")
"""Runs whose own replies the others are held against."""
LISTENERS = ("kept", "compacted", "in_place", "rebuilt")
REPLY = ("reply", "turn", "read", "reference", "arm")
"""Columns that say which reply a row is of, and which two runs are held against each other there."""
Scores = Mapping[str, Float[Tensor, "reply vocab"]]
"""The logits that the tokens of a reply met, by run."""


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables of rows, see `tables_of`."""
    parts, asked = Parts(model, config, run), sessions()[: config.sessions]
    return tables_of(parts.table(read_session, asked, "session", doing="Reading sessions", unit="session"))


def tables_of(read: Any) -> dict[str, pd.DataFrame]:
    """What `read_session` gave of all sessions: `tokens`, `layers`, and `samples`, the means of `tokens` by reply, with
    the number of its `tokens` and how many come before the first that differs (`alike`)."""
    of_token = read["layer"].isna()
    layers = read.loc[~of_token, ["sample", "family", "layer", "segment", "distance"]].astype({"layer": int})
    tokens = read.loc[of_token, ["sample", *REPLY, "token", "kl", "agrees", "nll"]]
    tokens = tokens.astype(dict.fromkeys(("turn", "read", "token"), int)).reset_index(drop=True)
    by_reply = tokens.assign(alike=tokens.groupby(["sample", *REPLY])["agrees"].cumprod())
    samples = by_reply.groupby(["sample", *REPLY], sort=False, as_index=False).agg(
        **{name: (name, "mean") for name in ("kl", "agrees", "nll")}, alike=("alike", "sum"), tokens=("token", "max")
    )
    return {"tokens": tokens, "samples": samples, "layers": layers}


def read_session(model: Model, config: Config, session: Session) -> pd.DataFrame:
    """All measurements of one session.

    Returns:
        One row per `token` of a `reply`, arm and reference: `kl` from the reference, whether both would say the same
        token (`agrees`), and `nll`. Replies are the `scripted` ones of turns 2 to 8, after so many turns `read` since
        turn 3 (below 0 before it); the reference's `own`, which the arm reads; and, of turns 4 to 8, the scripted
        ones to questions that were asked `early`, at every rebuild before their own turn, and at it. And one row per
        family, layer and segment: the `distance` of K or V of the run that was rebuilt in place from those of the
        compacted one, relative to their size.
    """
    removal = REMOVALS[config.removed]
    tokens = removal.conversation(session).tokens(model.tokenizer)
    replies = {turn: tokens.ids[tokens.part(f"reply{turn}")] for turn in MEASURED}
    tables: list[pd.DataFrame] = []
    runs = [NamedRows(("kept",), model.prefill(tokens[: tokens.span(f"T{MEASURED[0]}").start]))]
    waiting: dict[int, list[NamedRows]] = {}
    fresh = ""
    for turn in MEASURED:
        between = tokens[tokens.span(f"T{turn - 1}").stop : tokens.span(f"T{turn}").start]
        if len(between):  # a summary, and what it is of
            runs, _ = read_on(model, runs, between)
        if turn in removal.leaves:
            runs = _removed(model, runs, removal, turn)
        if turn in config.rebuilds:
            fresh = f"rebuilt{turn}"
            runs[-1] = runs[-1].joined(fresh, rebuilt(model, tokens, runs[0].only("kept").cache, removal, turn))
            for later in range(turn + 1, TURNS + 1) if turn in AFTER else ():
                pair = replace(runs[-1].only("compacted", fresh), names=("compacted", "rebuilt"))
                exchange = tokens[tokens.span(f"T{later}").start : tokens.part(f"reply{later}").stop - 1]
                _, scores = read_on(model, [pair], exchange, logits=len(replies[later]))
                tables += compared(("early", later, turn - AFTER[0]), replies[later], scores)
        read = turn - AFTER[0]
        asked, _ = read_on(model, runs, question(tokens, turn))
        runs, scores = _answered(model, asked, tokens, turn)
        if turn in AFTER:
            listening = asked[1].only("compacted", "in_place", fresh)
            waiting[turn] = [asked[0], replace(listening, names=("compacted", "in_place", "rebuilt"))]
            early = {"compacted": scores["compacted"], "rebuilt": scores[fresh]}
            tables += compared(("early", turn, read), replies[turn], early)
        else:
            scores = {**scores, "compacted": scores["kept"]}
        tables += compared(("scripted", turn, read), replies[turn], scores, REFERENCES)
    for (speaker, turn), reply in _own_replies(model, waiting, tokens, config.continuation).items():
        said = last_of_header(tokens, turn).answered(reply, "own")
        _, scores = read_on(model, waiting[turn], said, logits=len(reply))
        heard = {name: scores[name] for name in LISTENERS}
        tables += compared(("own", turn, turn - AFTER[0]), reply, heard, (speaker,))
    distance = relative_distance(runs[1].only("in_place").cache, runs[1].only("compacted").cache, removal.shared)
    keys = {"family": FAMILIES, "layer": range(distance.shape[1]), "segment": removal.shared}
    rows = pd.concat([*tables, crossed(keys, {"distance": distance.cpu().numpy()})], ignore_index=True)
    return rows.assign(sample=session.id)


def rebuilt(model: Model, tokens: Tokens, kept: KVCache, removal: Removal, turn: int) -> KVCache:
    """The cache of a session that went idle before this turn, computed again from what its text shows then.

    Before the removal the text shows everything; after it, all but what is hidden.
    """
    if turn in AFTER:
        return model.apply(RestartRebuilt(removal.hidden(turn), removal.delimiters), kept)
    return model.prefill(tokens[: tokens.span(f"T{turn}").start])


def compared(
    place: tuple[str, int, int], reply: Sequence[int], scores: Scores, references: Sequence[str] = ("compacted",)
) -> list[pd.DataFrame]:
    """A table for each run and reference: how far apart they are at each token of a reply, and its surprise.

    Args:
        place: the kind of reply, its turn, and how many turns were read since the summary.
    """
    tables = []
    expected = {arm: logits.float().log_softmax(-1) for arm, logits in scores.items()}
    said = torch.tensor(reply, device=next(iter(expected.values())).device)
    for arm, mine in expected.items():
        likeliest, nll = mine.argmax(-1), -mine[range(len(reply)), said]
        for reference in (name for name in references if name in scores):
            agrees = likeliest == said if place[0] == "own" else likeliest == expected[reference].argmax(-1)
            kl = relative_entropy(expected[reference], mine).clamp(min=0)  # rounding can leave a 0 below 0
            values = {"kl": kl, "agrees": agrees, "nll": nll}
            table = pd.DataFrame({name: value.double().cpu().numpy() for name, value in values.items()})
            keys = dict(zip(REPLY, (*place, reference, arm), strict=True))
            tables.append(table.assign(**keys, token=range(1, len(table) + 1)))
    return tables


def _removed(model: Model, runs: Sequence[NamedRows], removal: Removal, turn: int) -> list[NamedRows]:
    """The runs as this turn finds them: `kept` goes on as it is, the others lose what leaves before the turn."""
    kept = runs[0].only("kept")
    running = replace(runs[0], names=("compacted", *runs[0].names[1:]))
    if len(runs) > 1:
        running = runs[1].only(*(name for name in runs[1].names if name != "in_place"))
    masked = model.apply(MaskSpans(removal.leaves[turn], removal.delimiters), running.cache)
    in_place = model.apply(RestartInPlace(removal.hidden(turn), removal.delimiters), kept.cache)
    return [kept, replace(running, cache=masked).joined("in_place", in_place)]


def _answered(model: Model, runs: Sequence[NamedRows], tokens: Tokens, turn: int) -> tuple[list[NamedRows], Scores]:
    """Let the runs, who have read the question, read the scripted reply; the logits that each of its tokens met."""
    reply = tokens.part(f"reply{turn}")
    rest = tokens[reply.start - 1 : tokens.span(f"T{turn}").stop]
    runs, scores = read_on(model, runs, rest, logits=len(rest))
    return runs, {name: logits[: reply.stop - reply.start] for name, logits in scores.items()}


def _own_replies(
    model: Model, waiting: Mapping[int, list[NamedRows]], tokens: Tokens, continuation: int
) -> dict[tuple[str, int], tuple[int, ...]]:
    """What each speaker, greedily, would reply itself at each turn whose question the runs have read; speakers and
    turns are rows of one batch."""
    heard = {
        (speaker, turn): rows.only(speaker).cache
        for speaker in SPEAKERS
        for turn, group in waiting.items()
        for rows in group
        if speaker in rows.names
    }
    past, headers = KVCache.join(list(heard.values())), [last_of_header(tokens, turn) for _, turn in heard]
    said = generate(model.lanes, onwards(past, headers), past, max_new_tokens=continuation).tokens
    return dict(zip(heard, said, strict=True))
