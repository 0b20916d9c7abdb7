"""Reading the sessions: what every run says at every turn, and how far its cache is from the one that was kept.

All runs read the same text, turn by turn, as rows of one batch. A run that is rebuilt before a turn joins them there.
At each turn the runs are held against each other over the scripted reply, and over the replies that two of them would
have given themselves. One file per session is kept, so an interrupted collection resumes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.experiments.parts import tensor_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import divergence
from kvprobe.policies import MaskSpans, RestartInPlace, RestartRebuilt
from kvprobe.studies.idle_rebuild.config import Config
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
EARLY = ("compacted", "rebuilt")
"""Runs that are asked each question early, too."""
SHARED = ("system", "summary", *(f"T{turn}" for turn in AFTER))
"""Segments that a compacted and a rebuilt cache both hold."""
FAMILIES = ("k", "v")


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
    """Tables of rows, see `tables_of`, whose `sample` is the session."""
    chosen = sessions()[: config.sessions]
    paths = tensor_parts(
        run,
        chosen,
        "session",
        lambda session: read_session(model, session, config.continuation),
        doing="Reading sessions",
        unit="session",
    )
    return joined((session.id, tables_of(load_file(path))) for session, path in zip(chosen, paths, strict=True))


def joined(tables: Iterable[tuple[str, Mapping[str, pd.DataFrame]]]) -> dict[str, pd.DataFrame]:
    """The tables of all sessions, each named by its id."""
    named = [{name: table.assign(sample=session) for name, table in own.items()} for session, own in tables]
    return {name: pd.concat([own[name] for own in named], ignore_index=True) for name in named[0]}


def tables_of(tensors: Mapping[str, Tensor]) -> dict[str, pd.DataFrame]:
    """What `read_session` measured, as rows.

    Returns:
        `tokens`: one row per token of a reply (`reply`: the scripted one, the reference's own, or the scripted one to a
        question that was asked early), turn, number of turns `read` since the summary, reference and arm. `samples`:
        their means by reply, with its number of `tokens` and how many come before the first that differs (`alike`).
        `layers`: the distances.
    """
    found: dict[str, Any] = {name: tensor.double().numpy() for name, tensor in tensors.items()}
    scripted = _rows(
        {"reference": REFERENCES, "arm": ARMS, "turn": MEASURED, "token": None},
        kl=found["kl"],
        agrees=found["agrees"],
        nll=np.broadcast_to(found["nll"], found["kl"].shape),
    )
    own = _rows(
        {"reference": SPEAKERS, "arm": LISTENERS, "turn": AFTER, "token": None},
        kl=found["own_kl"],
        agrees=found["own_agrees"],
    )
    early = _rows(
        {"arm": EARLY, "turn": AFTER, "read": range(len(AFTER)), "token": None},
        kl=np.stack([0 * found["early_kl"], found["early_kl"]]),
        nll=found["early_nll"],
    )
    tables = [
        early.assign(reply="early", reference="compacted"),
        *(
            each.assign(reply=name, read=each["turn"] - AFTER[0])
            for name, each in (("scripted", scripted), ("own", own))
        ),
    ]
    tokens = pd.concat([table.dropna(subset="kl") for table in tables], ignore_index=True)
    by_reply = tokens.groupby(["reply", "reference", "arm", "turn", "read"], sort=False)
    samples = by_reply.agg(kl=("kl", "mean"), agrees=("agrees", "mean"), nll=("nll", "mean"), tokens=("token", "max"))
    alike = by_reply["agrees"].cumprod()
    samples["alike"] = alike.groupby([tokens[name] for name in samples.index.names]).sum(min_count=1)
    layers = range(found["distance"].shape[1])
    distances = _rows({"family": FAMILIES, "layer": layers, "segment": SHARED}, distance=found["distance"])
    return {"tokens": tokens, "samples": samples.reset_index(), "layers": distances}


def _rows(axes: Mapping[str, Sequence[Any] | None], **values: Float[np.ndarray, "..."]) -> pd.DataFrame:
    """A row for each number, named along its axes; numbered from 1 along an axis that has no names."""
    shape = next(iter(values.values())).shape
    places = np.indices(shape).reshape(len(shape), -1)
    named = {
        name: place + 1 if names is None else np.array(names)[place]
        for (name, names), place in zip(axes.items(), places, strict=True)
    }
    return pd.DataFrame({**named, **{key: each.reshape(-1) for key, each in values.items()}})


def read_session(model: Model, session: Session, continuation: int) -> dict[str, Tensor]:
    """All measurements of one session; NaN where a run, turn or token does not exist.

    Returns:
        Of the scripted replies `kl` (from each of REFERENCES to each of ARMS) and `agrees` (whether both would say the
        same token next) `[references, arms, turns, tokens]` and `nll` `[arms, turns, tokens]`, for turns 2 to 8.
        Of the replies that SPEAKERS would give, `own_kl` and `own_agrees` (whether a listener would say that very
        token) `[speakers, listeners, turns, continuation]`, for turns 4 to 8. Of turns 4 to 8 asked when only so many
        of the turns after the summary were read, `early_kl` (compacted to rebuilt) `[turns, read, tokens]` and
        `early_nll` `[arms, turns, read, tokens]`. And `distance` `[families, layers, segments]`, how far K and V of the
        run that was rebuilt in place are from those of the compacted one, relative to their size.
    """
    tokens = conversation(session).tokens(model.tokenizer)
    found = _Findings(tokens, continuation)
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
                found.early(later, turn - AFTER[0], scores["compacted"], scores[fresh])
        asked, _ = read_on(model, runs, question(tokens, turn))
        if turn in AFTER:
            others = asked[1].only("compacted", "in_place", fresh)
            waiting[turn] = [asked[0], replace(others, names=("compacted", "in_place", "rebuilt"))]
        runs, scores = _answered(model, asked, tokens, turn)
        if turn in AFTER:
            found.scripted(turn, scores)
            found.early(turn, turn - AFTER[0], scores["compacted"], scores[fresh])
        else:
            found.scripted(turn, {**scores, "compacted": scores["kept"]})
    for speaker in SPEAKERS:
        for turn, own in _own_replies(model, speaker, waiting, tokens, continuation).items():
            _, scores = read_on(model, waiting[turn], _said(tokens, turn, own), logits=len(own))
            found.own(turn, speaker, own, scores)
    distance = relative_distance(runs[1].only("in_place").cache, runs[1].only("compacted").cache)
    return {name: tensor.contiguous().cpu() for name, tensor in {**found.tensors, "distance": distance}.items()}


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
        placed = [tokens.shifted(position) for position in rows.cache.ledger.following.tolist()]
        cache, found = model.extend(rows.cache, placed, logits=logits)
        grown.append(replace(rows, cache=cache))
        scores |= dict(zip(rows.names, found, strict=True))
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
    return runs, {name: found[: reply.stop - reply.start] for name, found in scores.items()}


def _own_replies(
    model: Model, speaker: str, waiting: dict[int, list[Rows]], tokens: Tokens, continuation: int
) -> dict[int, tuple[int, ...]]:
    """What this run, greedily, would reply itself at each turn whose question it has read; turns are rows of one
    batch."""
    past = KVCache.join(
        [rows.only(speaker).cache for group in waiting.values() for rows in group if speaker in rows.names]
    )
    headers = [_said(tokens, turn, ()) for turn in waiting]
    prompts = [row.shifted(start) for row, start in zip(headers, past.ledger.following.tolist(), strict=True)]
    said = generate(model.lanes, prompts, past, max_new_tokens=continuation).tokens
    return dict(zip(waiting, said, strict=True))


def _said(tokens: Tokens, turn: int, reply: Sequence[int]) -> Tokens:
    """What is read after a question to learn of each of these tokens: the header's last, and all of them but the
    last."""
    header = tokens.part(f"reply{turn}").start - 1
    last = tokens[header : header + 1]
    return last + Tokens.of(reply[:-1], "own", last.following)


class _Findings:
    """The tensors that `read_session` returns, filled in turn by turn."""

    def __init__(self, tokens: Tokens, continuation: int) -> None:
        self._replies = {turn: list(tokens.ids[tokens.part(f"reply{turn}")]) for turn in MEASURED}
        longest = max(map(len, self._replies.values()))
        early = (len(AFTER), len(AFTER), longest)
        shapes = {
            "kl": (len(REFERENCES), len(ARMS), len(MEASURED), longest),
            "agrees": (len(REFERENCES), len(ARMS), len(MEASURED), longest),
            "nll": (len(ARMS), len(MEASURED), longest),
            "own_kl": (len(SPEAKERS), len(LISTENERS), len(AFTER), continuation),
            "own_agrees": (len(SPEAKERS), len(LISTENERS), len(AFTER), continuation),
            "early_kl": early,
            "early_nll": (len(EARLY), *early),
        }
        self.tensors = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}

    def scripted(self, turn: int, scores: dict[str, Float[Tensor, "reply vocab"]]) -> None:
        """What the runs say of a turn's scripted reply."""
        reply, column = self._replies[turn], MEASURED.index(turn)
        for name, logits in scores.items():
            arm = ARMS.index(name)
            self.tensors["nll"][arm, column, : len(reply)] = _surprise(logits, reply)
            for index, reference in enumerate(REFERENCES):
                if reference in scores:
                    kl, agrees = divergence(scores[reference], logits)
                    self.tensors["kl"][index, arm, column, : len(reply)] = kl
                    self.tensors["agrees"][index, arm, column, : len(reply)] = agrees.float()

    def own(
        self, turn: int, speaker: str, reply: Sequence[int], scores: dict[str, Float[Tensor, "reply vocab"]]
    ) -> None:
        """What the listeners say of a reply that the speaker would have given."""
        said = torch.tensor(reply, device=scores[speaker].device)
        for index, listener in enumerate(LISTENERS):
            place = (SPEAKERS.index(speaker), index, AFTER.index(turn), slice(len(reply)))
            self.tensors["own_kl"][place] = divergence(scores[speaker], scores[listener])[0]
            self.tensors["own_agrees"][place] = (scores[listener].argmax(-1) == said).float()

    def early(
        self,
        turn: int,
        read: int,
        compacted: Float[Tensor, "reply vocab"],
        rebuilt: Float[Tensor, "reply vocab"],
    ) -> None:
        """What two runs say of a turn's scripted reply when they have read so many turns after the summary."""
        reply = self._replies[turn]
        place = (AFTER.index(turn), read, slice(len(reply)))
        self.tensors["early_kl"][place] = divergence(compacted, rebuilt)[0]
        for arm, logits in enumerate((compacted, rebuilt)):
            self.tensors["early_nll"][arm][place] = _surprise(logits, reply)


def _surprise(logits: Float[Tensor, "reply vocab"], reply: Sequence[int]) -> Float[Tensor, "reply"]:
    """Negative log-probability of each token of the reply, in nats."""
    ids: Int[Tensor, "reply 1"] = torch.tensor(reply, device=logits.device)[:, None]
    return -logits.float().log_softmax(-1).gather(1, ids)[:, 0]
