"""From conversations to tables: each is read under every arm, then probes are fitted on what all of them hold.

One file per conversation is kept, so an interrupted run resumes.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from torch import Tensor

from kvprobe.experiments.parts import Labelled, Parts, arms_of_parts, tensor_of_parts, text_of_part
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.probing.arms import Arms
from kvprobe.probing.by_split import fit_by_split, folds_by_split
from kvprobe.progress import Bar
from kvprobe.studies.compaction import Config
from kvprobe.studies.compaction.arms import ARMS, RETAINED
from kvprobe.studies.compaction.reading import ASKED, CONDITIONS, FAMILIES, LOOKED_AT, SEEN, WORTH, read_context
from kvprobe.tasks.compaction import KINDS, compactions
from kvprobe.tasks.passcode import CODE, contexts, draw_codes
from kvprobe.tidy import crossed


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """What was measured.

    Returns:
        `samples`: per code and condition, how well the model knows the code, and the share of its digits that the probe
        reads which was chosen on the inner fold, by split. `conversations`: per conversation and condition, the
        continuation, and the answers with what they are worth. `attention`: per conversation, condition and head, where
        T3's queries look. `variation`: how far K and V of T3 vary with the code. `probes`: accuracy of every probe.
    """
    codes = draw_codes(config.samples, np.random.default_rng([config.seed, 1]), model.tokenizer)
    cases = [(index, of.tolist()) for index, of in enumerate(np.array_split(np.array(codes), config.contexts))]
    doing, unit = "Reading under every arm", "conversation"
    paths = Parts(model, config, run).tensors(measure, cases, "arms", doing=doing, unit=unit)
    arms = arms_of_parts(paths, FAMILIES, CODE)
    probed, used = fitted(arms, config), arms.use(ASKED)
    samples = used.assign(code=arms.named()[used["sample"]])
    return {
        "samples": samples.merge(probed.pop("digits"), "left", on=["sample", "condition"], validate="1:1"),
        "conversations": conversations_of(paths),
        "attention": attention_of(paths),
        **probed,
    }


def measure(model: Model, config: Config, case: tuple[int, list[str]]) -> Labelled:
    """What is read of one conversation and its codes, with the answers; see `read_context`."""
    index, codes = case
    context, compaction = contexts()[index], compactions()[index]
    others = [other for other in contexts() if other != context]
    filler = others[index % len(others) :] + others[: index % len(others)]
    tensors, texts = read_context(model, context, compaction, filler, codes, config)
    return Labelled(tensors, {"answers": json.dumps(texts)})


def conversations_of(paths: Sequence[Path]) -> pd.DataFrame:
    """One row per conversation and condition: means over the reply, and each answer with what it is worth."""

    def numbers(name: str) -> Tensor:
        return tensor_of_parts(paths, name, stacked=True).double()

    kl, worth = numbers("reply_kl"), numbers("worth").unbind(-1)
    texts = np.array([json.loads(text_of_part(path, "answers")) for path in paths], object)
    answers = {"answer": texts.reshape(worth[0].shape), **dict(zip(WORTH, worth, strict=True))}
    columns = {
        "kl": kl.nanmean(-1),
        "agreement": numbers("agree").nanmean(-1),
        "between": numbers("between").nanmean(-1),
        "tokens": kl.isfinite().sum(-1),
        **{f"{name}_{kind}": of[..., place] for name, of in answers.items() for place, kind in enumerate(KINDS)},
    }
    return crossed({"context": range(len(paths)), "condition": CONDITIONS}, columns)


def attention_of(paths: Sequence[Path]) -> pd.DataFrame:
    """One row per conversation, condition, layer and head: the share of attention that goes to each place."""
    shares = tensor_of_parts(paths, "attention", stacked=True).double()
    keys = {"context": range(len(paths)), "condition": SEEN}
    keys |= {"layer": range(shares.shape[2]), "head": range(shares.shape[3])}
    return crossed(keys, dict(zip(LOOKED_AT, shares.unbind(-1), strict=True)))


def fitted(arms: Arms, config: Config) -> dict[str, pd.DataFrame]:
    """The tables of what probes read; `digits` has the share of each code's digits that is read right, by split."""
    folds = folds_by_split(arms.contexts, config.folds, np.random.default_rng([config.seed, 2]))
    digits, probes = [], []
    for arm in Bar(ARMS, desc="Fitting probes", unit="arm"):
        fits = fit_by_split(arms.features(arm.name), folds)
        by_split = fits.samples.pivot(index="sample", columns="split", values="accuracy")
        digits.append(by_split.reset_index().assign(condition=arm.name))
        probes.append(fits.probes.drop(columns="head").assign(arm=arm.name))
    variation = [arms.variation(arm.name).assign(arm=arm.name) for arm in RETAINED]
    tables = {"digits": digits, "variation": variation, "probes": probes}
    return {name: pd.concat(parts, ignore_index=True) for name, parts in tables.items()}
