"""From token measurements to numbers: drift by turn, by cause and by distance, each with its interval over sessions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int
from safetensors.numpy import load_file

from kvprobe.stats import SHARE, UNBOUNDED, estimate, means
from kvprobe.studies.idle_rebuild.collect import (
    AFTER,
    ARMS,
    CONTROLS,
    FAMILIES,
    LISTENERS,
    MEASURED,
    REFERENCES,
    SHARED,
    SPEAKERS,
)
from kvprobe.studies.idle_rebuild.config import Config

SHOWN = ("kept", "compacted", "in_place", "rebuilt", "control")
"""Runs in tables and figures: `rebuilt` went idle right before the turn, `control` last before the compaction."""
GROUPS = {"all": AFTER, "new": AFTER[:1], "back": AFTER[1:]}
"""Turns after the compaction: all, the one that opens a new matter, those that ask back."""
CLAIMS = 4
"""Of the headline: drift, cost, cause, healing. The intervals that decide them hold together."""
Interval = Callable[..., dict[str, Any]]
"""The mean over replies with its interval over sessions, as `metrics.json` holds it."""
_ENOUGH = 0.75
"""Share of replies that must be long enough for a token's place in the reply to be shown."""


@dataclass(frozen=True)
class Collected:
    """All sessions together; the measurements are those of `collect.read_session`, sessions first."""

    measured: dict[str, Float[np.ndarray, "sessions ..."]]

    @classmethod
    def load(cls, paths: Sequence[Path]) -> "Collected":
        """Join the files that `collect` wrote; the replies of one session may be longer than those of another."""
        files = [{name: each.astype(float) for name, each in load_file(path).items()} for path in paths]
        joined = {}
        for name in files[0]:
            longest = max(file[name].shape[-1] for file in files)
            widths = [(0, 0)] * (files[0][name].ndim - 1)
            joined[name] = np.stack(
                [
                    np.pad(file[name], [*widths, (0, longest - file[name].shape[-1])], constant_values=np.nan)
                    for file in files
                ]
            )
        return cls(joined)


@dataclass(frozen=True)
class Analysis:
    """The numbers of a run.

    Attributes:
        samples: one row per session, turn, condition and reference: what was measured over the reply.
        tokens: the divergence token by token, of the scripted replies after the compaction.
        layers: how far K and V are apart, by layer and segment, with its interval.
        metrics: the headline numbers.
    """

    samples: pd.DataFrame
    tokens: pd.DataFrame
    layers: pd.DataFrame
    metrics: dict[str, Any]


def analyse(collected: Collected, config: Config) -> Analysis:
    """Average over replies; all intervals are over sessions."""
    found = collected.measured
    shown = {name: _shown(found[name]) for name in ("kl", "agrees", "nll")}
    replies = {name: _per_reply(values) for name, values in shown.items()}
    every_run = _per_reply(found["kl"][:, REFERENCES.index("compacted")])
    early = {name: _per_reply(found[name]) for name in ("early_kl", "early_nll")}
    alike = _said_alike(found["own_agrees"])

    def of(
        values: Float[np.ndarray, "sessions *replies"], within: tuple[float, float] = UNBOUNDED, comparisons: int = 1
    ) -> dict[str, Any]:
        return estimate(*_flat(values), within, comparisons).record()

    metrics: dict[str, Any] = {
        "sessions": config.sessions,
        "replies": config.sessions * len(AFTER),
        "matrix": {
            f"rebuilt{before}": {
                str(turn): of(every_run[:, ARMS.index(f"rebuilt{before}"), MEASURED.index(turn)])
                for turn in MEASURED
                if turn >= before
            }
            for before in MEASURED
        },
        "by_turn": {
            arm: {
                str(turn): {
                    "kl_from_compacted": of(replies["kl"][:, 0, row, column]),
                    "kl_from_kept": of(replies["kl"][:, 1, row, column]),
                    "nll": of(replies["nll"][:, row, column]),
                    "nll_over_compacted": of((replies["nll"][:, row] - replies["nll"][:, 1])[:, column]),
                }
                for column, turn in enumerate(MEASURED)
                if not np.isnan(replies["nll"][:, row, column]).any()
            }
            for row, arm in enumerate(SHOWN)
        },
        "drift": {group: _drift(replies, turns, of) for group, turns in GROUPS.items()},
        "healing": _healing(early, of),
        "own": {
            speaker: {
                listener: {
                    "kl": of(_per_reply(found["own_kl"])[:, row, column]),
                    "agreement": of(_per_reply(found["own_agrees"])[:, row, column], SHARE),
                    "alike": of(alike[:, row, column]),
                    "identical": of((alike >= _lengths(found["own_agrees"]))[:, row, column].astype(float), SHARE),
                }
                for column, listener in enumerate(LISTENERS)
            }
            for row, speaker in enumerate(SPEAKERS)
        },
        "in_reply": _in_reply(shown["kl"], found["own_kl"]),
        "controls": _controls(found, every_run),
    }
    layers = _layer_table(found["distance"])
    return Analysis(_sample_table(replies, found, alike), _token_table(shown), layers, metrics)


def _shown(values: Float[np.ndarray, "sessions ..."]) -> Float[np.ndarray, "sessions ..."]:
    """Of all runs (third axis from the end) those of SHOWN."""
    arms = np.moveaxis(values, -3, 0)
    rebuilt = np.full_like(arms[0], np.nan)
    for column, turn in enumerate(MEASURED):
        if turn in AFTER:
            rebuilt[..., column, :] = arms[ARMS.index(f"rebuilt{turn}"), ..., column, :]
    control = arms[ARMS.index(f"rebuilt{CONTROLS[-1]}")]
    picked = [*(arms[ARMS.index(name)] for name in SHOWN[:3]), rebuilt, control]
    return np.moveaxis(np.stack(picked), 0, -3)


def _per_reply(values: Float[np.ndarray, "... tokens"]) -> Float[np.ndarray, "..."]:
    """The mean over the tokens of each reply; NaN where there is none."""
    count = _lengths(values)
    return np.where(count > 0, np.nansum(values, -1) / np.maximum(count, 1), np.nan)


def _lengths(values: Float[np.ndarray, "... tokens"]) -> Int[np.ndarray, "..."]:
    return (~np.isnan(values)).sum(-1)


def _said_alike(agrees: Float[np.ndarray, "... tokens"]) -> Float[np.ndarray, "..."]:
    """How many tokens of each reply come before the first that would have been another."""
    return (np.nan_to_num(agrees).cumprod(-1)).sum(-1)


def _flat(values: Float[np.ndarray, "sessions *replies"]) -> tuple[np.ndarray, Int[np.ndarray, "samples"]]:
    """All replies in a row, and the session of each."""
    return values.reshape(-1), np.repeat(np.arange(len(values)), values[0].size)


def _drift(replies: dict[str, np.ndarray], turns: Sequence[int], of: Interval) -> dict[str, Any]:
    """What the runs are apart over these turns, and how well each predicts the scripted replies."""
    columns = [MEASURED.index(turn) for turn in turns]
    kl, agrees = replies["kl"][..., columns], replies["agrees"][..., columns]
    nll = {arm: replies["nll"][:, row][:, columns] for row, arm in enumerate(SHOWN)}
    compacted, kept, in_place = range(len(REFERENCES))
    rebuilt, control = SHOWN.index("rebuilt"), SHOWN.index("control")
    return {
        "kl_from_compacted": {arm: of(kl[:, compacted, row]) for row, arm in enumerate(SHOWN)},
        "kl_from_kept": {arm: of(kl[:, kept, row]) for row, arm in enumerate(SHOWN)},
        "agreement": {arm: of(agrees[:, compacted, row], SHARE) for row, arm in enumerate(SHOWN)},
        "over_control": of(kl[:, compacted, rebuilt] - kl[:, compacted, control], comparisons=CLAIMS),
        "position": of(kl[:, in_place, rebuilt]),
        "position_agreement": of(agrees[:, in_place, rebuilt], SHARE),
        "provenance_over_position": of(
            kl[:, compacted, SHOWN.index("in_place")] - kl[:, in_place, rebuilt], comparisons=CLAIMS
        ),
        "nearer_to_kept": of(kl[:, kept, rebuilt] - kl[:, kept, SHOWN.index("compacted")]),
        "nll": {arm: of(values) for arm, values in nll.items()},
        "nll_difference": {
            "rebuilt - compacted": of(nll["rebuilt"] - nll["compacted"], comparisons=CLAIMS),
            "in_place - compacted": of(nll["in_place"] - nll["compacted"]),
            "rebuilt - in_place": of(nll["rebuilt"] - nll["in_place"]),
            "compacted - kept": of(nll["compacted"] - nll["kept"]),
            "rebuilt - kept": of(nll["rebuilt"] - nll["kept"]),
        },
    }


def _healing(early: dict[str, np.ndarray], of: Interval) -> dict[str, Any]:
    """What each turn read after the summary does to the drift at one and the same question."""
    kl, nll = early["early_kl"], early["early_nll"]
    asked = range(1, len(AFTER))
    right_after, in_place = kl[:, asked, 0], kl[:, asked, asked]
    return {
        "cells": [
            [of(kl[:, turn, read]) if read <= turn else None for read in range(len(AFTER))]
            for turn in range(len(AFTER))
        ],
        "slope": of(_slope(kl), comparisons=CLAIMS),
        "nll_slope": of(_slope(nll[:, 1] - nll[:, 0])),
        "right_after": of(right_after),
        "at_its_place": of(in_place),
        "change": of(in_place - right_after),
    }


def _slope(values: Float[np.ndarray, "sessions turns read"]) -> Float[np.ndarray, "sessions"]:
    """The change per turn read, by least squares within each question, so that no two questions are compared."""
    read = np.where(np.isnan(values), np.nan, np.arange(values.shape[2]))
    centred = read - np.nanmean(read, 2, keepdims=True)
    return np.nansum(centred * values, (1, 2)) / np.nansum(centred**2, (1, 2))


def _in_reply(
    scripted: Float[np.ndarray, "sessions references runs turns tokens"],
    own: Float[np.ndarray, "sessions speakers listeners later_turns own_tokens"],
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Divergence from the compacted run by the token's place in the reply, over turns 4 to 8."""

    def places(values: Float[np.ndarray, "sessions turns tokens"]) -> list[dict[str, float]]:
        numbers, session = _flat(values[..., 0])
        there = np.stack([_flat(values[..., place])[0] for place in range(values.shape[2])])
        present = ~np.isnan(there)
        return [
            estimate(row[here], session[here]).record()
            for row, here in zip(there, present, strict=True)
            if here.sum() >= _ENOUGH * len(numbers)
        ]

    after = [MEASURED.index(turn) for turn in AFTER]
    return {
        "scripted": {
            arm: places(scripted[:, 0, SHOWN.index(arm)][:, after]) for arm in ("kept", "in_place", "rebuilt")
        },
        "own": {arm: places(own[:, 0, LISTENERS.index(arm)]) for arm in ("kept", "in_place", "rebuilt")},
    }


def _controls(found: dict[str, np.ndarray], every_run: Float[np.ndarray, "sessions runs turns"]) -> dict[str, float]:
    """What must be zero but for round-off, at its largest, and what it is to be compared with."""
    controls = [ARMS.index(f"rebuilt{turn}") for turn in CONTROLS]
    before = slice(len(CONTROLS))
    themselves = [LISTENERS.index(speaker) for speaker in SPEAKERS]
    later = every_run[:, [ARMS.index(f"rebuilt{turn}") for turn in AFTER]][..., [MEASURED.index(t) for t in AFTER]]
    distance = dict(zip(SHARED, np.moveaxis(found["distance"], -1, 0), strict=True))
    turns = np.stack([distance[f"T{turn}"] for turn in AFTER])
    return {
        "rebuilt_before_compaction": float(np.nanmax(found["kl"][:, 0, controls])),
        "rebuilt_before_compaction_from_kept": float(np.nanmax(found["kl"][:, 1, controls, before])),
        "before_compaction_agreement": float(np.nanmean(found["agrees"][:, 0, controls])),
        "whenever": float((np.nanmax(later, 1) - np.nanmin(later, 1)).max()),
        "own_reply_said_again": float(np.nanmean(found["own_agrees"][:, range(len(SPEAKERS)), themselves])),
        "system": float(distance["system"].max()),
        "summary_layer_0": float(distance["summary"][:, :, 0].max()),
        "turns_layers_0_1": float(turns[:, :, :, :2].max()),
        "summary_deepest": float(distance["summary"][:, :, -1].max()),
        "turns_deepest": float(turns[:, :, :, -1].max()),
    }


def _layer_table(distance: Float[np.ndarray, "sessions families layers segments"]) -> pd.DataFrame:
    mean, low, high = means(np.moveaxis(distance, 0, -1), np.arange(len(distance)))
    families, layers, segments = (axis.reshape(-1) for axis in np.indices(mean.shape))
    return pd.DataFrame(
        {
            "family": np.array(FAMILIES)[families],
            "layer": layers,
            "segment": np.array(SHARED)[segments],
            "distance": mean.reshape(-1),
            "low": low.reshape(-1),
            "high": high.reshape(-1),
        }
    )


def _sample_table(replies: dict[str, np.ndarray], found: dict[str, np.ndarray], alike: np.ndarray) -> pd.DataFrame:
    """One row per session, turn, condition and reference."""
    scripted = _rows(
        {"condition": SHOWN, "turn": MEASURED, "reference": REFERENCES},
        kl=np.einsum("srat->satr", replies["kl"]),
        agreement=np.einsum("srat->satr", replies["agrees"]),
        nll=np.repeat(replies["nll"][..., None], len(REFERENCES), -1),
    )
    own = _rows(
        {"reference": SPEAKERS, "condition": LISTENERS, "turn": AFTER},
        kl=_per_reply(found["own_kl"]),
        agreement=_per_reply(found["own_agrees"]),
        said_alike=alike,
    )
    read = range(len(AFTER))
    early = _rows({"turn": AFTER, "turns_read": read}, kl=_per_reply(found["early_kl"]))
    tables = [
        scripted.assign(measure="scripted reply"),
        own.assign(measure="own reply of the reference"),
        early.assign(measure="asked early", condition="rebuilt", reference="compacted"),
    ]
    table = pd.concat([table.dropna(subset="kl") for table in tables], ignore_index=True)
    first = ["session", "turn", "measure", "condition", "reference"]
    return table.reindex(columns=[*first, *table.columns.difference(first, sort=False)])


def _token_table(shown: dict[str, np.ndarray]) -> pd.DataFrame:
    """One row per session, condition, turn and token of the scripted reply, from the compacted run."""
    axes = {"condition": SHOWN, "turn": MEASURED, "token": range(shown["nll"].shape[-1])}
    return _rows(axes, kl=shown["kl"][:, 0], agrees=shown["agrees"][:, 0], nll=shown["nll"]).dropna(subset="nll")


def _rows(axes: dict[str, Sequence[Any]], **values: Float[np.ndarray, "sessions ..."]) -> pd.DataFrame:
    """A row for each number, named along the axes that follow the first, which is the session."""
    shape = next(iter(values.values())).shape
    places = np.indices(shape).reshape(len(shape), -1)
    named = {name: np.array(names)[place] for (name, names), place in zip(axes.items(), places[1:], strict=True)}
    return pd.DataFrame({"session": places[0], **named, **{key: each.reshape(-1) for key, each in values.items()}})
