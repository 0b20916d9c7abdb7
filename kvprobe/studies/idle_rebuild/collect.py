"""Reading the sessions: what every run says at every turn, and how far its cache is from the one that was kept.

All runs read the same text, turn by turn, as rows of one batch. A run that is rebuilt before a turn joins them there.
At each turn the runs are held against each other over the scripted reply, and over the replies that two of them would
have given themselves. One file per session is kept, so an interrupted collection resumes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.forward import onwards
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import divergence
from kvprobe.policies import MaskSpans, RestartInPlace, RestartRebuilt
from kvprobe.studies.idle_rebuild import Config
from kvprobe.tasks.sessions import SUMMARISED, TURNS, Session, conversation, sessions
from kvprobe.text.tokens import Tokens

MEASURED = tuple(range(2, TURNS + 1))
AFTER = tuple(range(len(SUMMARISED) + 1, TURNS + 1))
"""The turns after the compaction."""
CONTROLS = tuple(turn for turn in MEASURED if turn not in AFTER)
ARMS = ("kept", "compacted", "in_place", *(f"rebuilt{turn}" for turn in MEASURED))
REFERENCES = ("compacted", "kept", "in_place")
SPEAKERS = ("compacted", "kept")
"""Runs whose own replies the others are held against."""
LISTENERS = ("kept", "compacted", "in_place", "rebuilt")
SHARED = ("system", "summary", *(f"T{turn}" for turn in AFTER))
"""Segments that a compacted and a rebuilt cache both hold."""
FAMILIES = ("k", "v")
REPLY = ("reply", "turn", "read", "reference", "arm")
"""Columns that say which reply a row is of, and which two runs are held against each other there."""
Scores = Mapping[str, Float[Tensor, "reply vocab"]]
"""The logits that the tokens of a reply met, by run."""


@dataclass(frozen=True)
class Rows:
    """Runs whose caches hold as many slots, as rows of one batch."""

    names: tuple[str, ...]
    cache: KVCache

    def joined(self, name: str, cache: KVCache) -> "Rows":
        return Rows((*self.names, name), KVCache.join([self.cache, cache]))

    def only(self, *names: str) -> "Rows":
        return Rows(names, self.cache.rows([self.names.index(name) for name in names]))


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables of rows, see `tables_of`."""
    return tables_of(
        table_of_parts(
            run,
            sessions()[: config.sessions],
            "session",
            lambda session: read_session(model, session, config.continuation).assign(sample=session.id),
            doing="Reading sessions",
            unit="session",
        )
    )


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


def read_session(model: Model, session: Session, continuation: int) -> pd.DataFrame:
    """All measurements of one session.

    Returns:
        One row per `token` of a `reply`, arm and reference: `kl` from the reference, whether both would say the same
        token (`agrees`), and `nll`. Replies are the `scripted` ones of turns 2 to 8, after so many turns `read` since
        the summary (below 0 before it); the reference's `own`, which the arm reads; and, of turns 4 to 8, the scripted
        ones to questions that were asked `early`, when fewer turns were read. And one row per family, layer and
        segment: the `distance` of K or V of the run that was rebuilt in place from those of the compacted one, relative
        to their size.
    """
    tokens = conversation(session).tokens(model.tokenizer)
    measured = _Measured(tokens)
    runs = [Rows(("kept",), model.prefill(tokens[: tokens.span(f"T{MEASURED[0]}").start]))]
    waiting: dict[int, list[Rows]] = {}
    for turn in MEASURED:
        if turn == AFTER[0]:
            runs, _ = read_on(model, runs, tokens[tokens.span("summary")])
            runs = _compacted(model, runs)
        fresh = f"rebuilt{turn}"
        runs[-1] = runs[-1].joined(fresh, rebuilt(model, tokens, runs[0].only("kept").cache, turn))
        if turn in AFTER:
            pair = runs[-1].only("compacted", fresh)
            for later in range(turn + 1, TURNS + 1):
                reply = tokens.part(f"reply{later}")
                exchange = tokens[tokens.span(f"T{later}").start : reply.stop - 1]
                _, scores = read_on(model, [pair], exchange, logits=reply.stop - reply.start)
                measured.early(later, turn - AFTER[0], {"compacted": scores["compacted"], "rebuilt": scores[fresh]})
        asked, _ = read_on(model, runs, question(tokens, turn))
        if turn in AFTER:
            others = asked[1].only("compacted", "in_place", fresh)
            waiting[turn] = [asked[0], replace(others, names=("compacted", "in_place", "rebuilt"))]
        runs, scores = _answered(model, asked, tokens, turn)
        if turn in AFTER:
            measured.scripted(turn, scores)
            measured.early(turn, turn - AFTER[0], {"compacted": scores["compacted"], "rebuilt": scores[fresh]})
        else:
            measured.scripted(turn, {**scores, "compacted": scores["kept"]})
    for speaker in SPEAKERS:
        for turn, unscripted in _own_replies(model, speaker, waiting, tokens, continuation).items():
            _, scores = read_on(model, waiting[turn], _said(tokens, turn, unscripted), logits=len(unscripted))
            measured.own(turn, speaker, unscripted, scores)
    distance = relative_distance(runs[1].only("in_place").cache, runs[1].only("compacted").cache)
    distances = [
        {"family": family, "layer": layer, "segment": segment, "distance": float(value)}
        for family, layers in zip(FAMILIES, distance, strict=True)
        for layer, values in enumerate(layers)
        for segment, value in zip(SHARED, values, strict=True)
    ]
    return pd.concat([*measured.tables, pd.DataFrame(distances)], ignore_index=True)


def rebuilt(model: Model, tokens: Tokens, kept: KVCache, turn: int) -> KVCache:
    """The cache of a session that went idle before this turn, computed again from what its text shows then.

    Before the compaction the text shows everything; after it, all but the summarised turns.
    """
    if turn in AFTER:
        return model.apply(RestartRebuilt(SUMMARISED), kept)
    return model.prefill(tokens[: tokens.span(f"T{turn}").start])


def question(tokens: Tokens, turn: int) -> Tokens:
    """The user's message of a turn and the header of the answer, but for the header's last token: that one is read with
    the answer, whose first token is predicted from it."""
    return tokens[tokens.span(f"T{turn}").start : tokens.part(f"reply{turn}").start - 1]


def read_on(
    model: Model, runs: Sequence[Rows], tokens: Tokens, logits: int = 1
) -> tuple[list[Rows], dict[str, Float[Tensor, "last vocab"]]]:
    """Let every run read these tokens where its own cache ends; the logits after the last `logits` of them, by run."""
    grown, scores = [], {}
    for rows in runs:
        cache, by_row = model.extend(rows.cache, onwards(rows.cache, [tokens]), logits=logits)
        grown.append(replace(rows, cache=cache))
        scores |= dict(zip(rows.names, by_row, strict=True))
    return grown, scores


def relative_distance(cache: KVCache, reference: KVCache) -> Float[Tensor, "families layers segments"]:
    """‖difference‖ / ‖reference‖ of K and of V over the slots of each shared segment, which stand at equal
    positions."""
    if not torch.equal(cache.ledger.origins, reference.ledger.origins):
        raise UserError("Keys can be compared only where both caches computed them at the same positions.")
    places = [reference.ledger.in_segments([segment])[0] for segment in SHARED]

    def relative(one: Tensor, other: Tensor) -> Tensor:
        pairs = [(one[0][:, place].float(), other[0][:, place].float()) for place in places]
        return torch.stack([(mine - theirs).norm() / theirs.norm() for mine, theirs in pairs])

    return torch.stack(
        [
            torch.stack([relative(*pair) for pair in zip(mine, theirs, strict=True)])
            for mine, theirs in ((cache.keys, reference.keys), (cache.values, reference.values))
        ]
    )


def _compacted(model: Model, runs: Sequence[Rows]) -> list[Rows]:
    """The runs after the summary: `kept` goes on as it is, and what is compacted has lost the summarised turns."""
    kept = runs[0].only("kept")
    controls = runs[0].only(*(f"rebuilt{turn}" for turn in CONTROLS))
    names = ("compacted", "in_place", *controls.names)
    caches = [
        model.apply(MaskSpans(SUMMARISED), kept.cache),
        model.apply(RestartInPlace(SUMMARISED), kept.cache),
        model.apply(MaskSpans(SUMMARISED), controls.cache),
    ]
    return [kept, Rows(names, KVCache.join(caches))]


def _answered(
    model: Model, runs: Sequence[Rows], tokens: Tokens, turn: int
) -> tuple[list[Rows], dict[str, Float[Tensor, "reply vocab"]]]:
    """Let the runs, who have read the question, read the scripted reply; the logits that each of its tokens met."""
    reply = tokens.part(f"reply{turn}")
    rest = tokens[reply.start - 1 : tokens.span(f"T{turn}").stop]
    runs, scores = read_on(model, runs, rest, logits=len(rest))
    return runs, {name: logits[: reply.stop - reply.start] for name, logits in scores.items()}


def _own_replies(
    model: Model, speaker: str, waiting: dict[int, list[Rows]], tokens: Tokens, continuation: int
) -> dict[int, tuple[int, ...]]:
    """What this run, greedily, would reply itself at each turn whose question it has read; turns are rows of one
    batch."""
    past = KVCache.join(
        [rows.only(speaker).cache for group in waiting.values() for rows in group if speaker in rows.names]
    )
    headers = [_said(tokens, turn, ()) for turn in waiting]
    said = generate(model.lanes, onwards(past, headers), past, max_new_tokens=continuation).tokens
    return dict(zip(waiting, said, strict=True))


def _said(tokens: Tokens, turn: int, reply: Sequence[int]) -> Tokens:
    """What is read after a question to learn of each of these tokens: the header's last, and all of them but the
    last."""
    header = tokens.part(f"reply{turn}").start - 1
    last = tokens[header : header + 1]
    return last + Tokens.of(reply[:-1], "own", last.following)


class _Measured:
    """The rows that `read_session` returns, turn by turn."""

    def __init__(self, tokens: Tokens) -> None:
        self._replies = {turn: list(tokens.ids[tokens.part(f"reply{turn}")]) for turn in MEASURED}
        self.tables: list[pd.DataFrame] = []

    def scripted(self, turn: int, scores: Scores) -> None:
        """What the runs say of a turn's scripted reply."""
        for arm, logits in scores.items():
            nll = _surprise(logits, self._replies[turn])
            for reference in (name for name in REFERENCES if name in scores):
                kl, agrees = divergence(scores[reference], logits)
                self._add("scripted", turn, turn - AFTER[0], reference, arm, kl=kl, agrees=agrees, nll=nll)

    def own(self, turn: int, speaker: str, reply: Sequence[int], scores: Scores) -> None:
        """What the listeners say of a reply that the speaker would have given."""
        said = torch.tensor(reply, device=scores[speaker].device)
        for arm in LISTENERS:
            kl, _ = divergence(scores[speaker], scores[arm])
            self._add("own", turn, turn - AFTER[0], speaker, arm, kl=kl, agrees=scores[arm].argmax(-1) == said)

    def early(self, turn: int, read: int, scores: Scores) -> None:
        """What two runs say of a turn's scripted reply when they have read so many turns after the summary."""
        for arm, logits in scores.items():
            kl, _ = divergence(scores["compacted"], logits)
            self._add("early", turn, read, "compacted", arm, kl=kl, nll=_surprise(logits, self._replies[turn]))

    def _add(self, *reply: str | int, **values: Tensor) -> None:
        table = pd.DataFrame({name: value.double().cpu().numpy() for name, value in values.items()})
        self.tables.append(table.assign(**dict(zip(REPLY, reply, strict=True)), token=range(1, len(table) + 1)))


def _surprise(logits: Float[Tensor, "reply vocab"], reply: Sequence[int]) -> Float[Tensor, "reply"]:
    """Negative log-probability of each token of the reply, in nats."""
    ids: Int[Tensor, "reply 1"] = torch.tensor(reply, device=logits.device)[:, None]
    return -logits.float().log_softmax(-1).gather(1, ids)[:, 0]
