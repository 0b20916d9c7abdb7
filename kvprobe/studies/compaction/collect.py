"""From conversations to tables: each is read under every arm, then probes are fitted on what all of them hold.

One file per conversation is kept, so an interrupted run resumes.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from safetensors.torch import save_file
from torch import Tensor

from kvprobe.experiments.parts import tensor_of_parts, text_of_part, write_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.models.lens import Family
from kvprobe.probing.features import Features
from kvprobe.probing.fits import chosen, fit_sites
from kvprobe.probing.splits import SPLITS, centred_within, fold_numbers
from kvprobe.progress import Bar
from kvprobe.studies.compaction import Config
from kvprobe.studies.compaction.arms import ARMS, RETAINED
from kvprobe.studies.compaction.reading import ASKED, CONDITIONS, FAMILIES, LOOKED_AT, SEEN, read_context
from kvprobe.tasks.compaction import KINDS, compactions
from kvprobe.tasks.designs import Target
from kvprobe.tasks.passcode import contexts, draw_codes
from kvprobe.tidy import crossed

TARGET = Target("code", tuple("0123456789"))


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """What was measured.

    Returns:
        `samples`: per code and condition, how well the model knows the code, and the share of its digits that the probe
        reads which was chosen on the inner fold, by split. `conversations`: per conversation and condition, the
        continuation, and the answers with what they are worth. `attention`: per conversation, condition and head, where
        T3's queries look. `variation`: how far K and V of T3 vary with the code. `probes`: accuracy of every probe.
    """
    codes = draw_codes(config.samples, np.random.default_rng([config.seed, 1]), model.tokenizer)
    of_context = np.array_split(np.array(codes), config.contexts)
    conversations = list(zip(contexts(), compactions(), strict=True))

    def write(index: int, path: Path) -> None:
        context, compaction = conversations[index]
        others = [other for other, _ in conversations if other != context]
        filler = others[index % len(others) :] + others[: index % len(others)]
        tensors, texts = read_context(model, context, compaction, filler, of_context[index].tolist(), config)
        save_file(tensors, path, metadata={"texts": json.dumps(texts)})

    cases = range(config.contexts)
    paths = write_parts(run, cases, "arms.safetensors", write, doing="Reading under every arm", unit="conversation")
    tables, probed = measured(paths, codes), fitted(paths, codes, config)
    samples = tables["samples"].merge(probed.pop("digits"), "left", on=["sample", "condition"], validate="1:1")
    return {**tables, **probed, "samples": samples}


def measured(paths: Sequence[Path], codes: Sequence[str]) -> dict[str, pd.DataFrame]:
    """The tables of what was read."""

    def numbers(name: str, *, stacked: bool = True) -> Any:
        return tensor_of_parts(paths, name, stacked=stacked).double().numpy()

    known = numbers("kl"), numbers("agree"), numbers("between")
    said = [json.loads(text_of_part(path, "texts")) for path in paths]
    texts = np.array([[text[condition] for condition in CONDITIONS] for text in said], object)
    attention, cases = numbers("attention"), range(len(paths))
    shares: dict[str, Any] = dict(zip(LOOKED_AT, np.moveaxis(attention, -1, 0), strict=True))
    conversations = {
        **{
            name: pd.DataFrame(measured.reshape(-1, measured.shape[-1])).mean(axis=1)
            for name, measured in zip(("kl", "agreement", "between"), known, strict=True)
        },
        "tokens": np.isfinite(known[0]).sum(-1),
        **{
            f"{name}_{kind}": values[..., place]
            for name in ("same", "prefix", "right", "answer")
            for values in [texts if name == "answer" else numbers(name)]
            for place, kind in enumerate(KINDS)
        },
    }
    samples = {
        "context": np.repeat(cases, len(codes) // len(paths) * len(ASKED)),
        "code": np.repeat(codes, len(ASKED)),
        **{name: numbers(name, stacked=False).sum(-1) for name in ("logprob", "margin")},
        "token_accuracy": numbers("correct", stacked=False).mean(-1),
    }
    heads = {"layer": range(attention.shape[2]), "head": range(attention.shape[3])}
    return {
        "samples": crossed({"sample": range(len(codes)), "condition": ASKED}, samples),
        "conversations": crossed({"context": cases, "condition": CONDITIONS}, conversations),
        "attention": crossed({"context": cases, "condition": SEEN, **heads}, shares),
    }


def fitted(paths: Sequence[Path], codes: Sequence[str], config: Config) -> dict[str, pd.DataFrame]:
    """The tables of what probes read; `digits` has the share of each code's digits that is read right."""
    owners = np.repeat(np.arange(len(paths)), len(codes) // len(paths))
    labels = torch.tensor([[int(digit) for digit in code] for code in codes]).T.contiguous()
    rng = np.random.default_rng([config.seed, 2])
    folds = {split: fold_numbers(split, owners, config.folds, rng) for split in SPLITS}
    digits, variation, probes = [], [], []
    for arm in Bar(ARMS, desc="Fitting probes", unit="arm"):
        tensors: dict[Family, Tensor] = {family: tensor_of_parts(paths, f"{arm.name}.{family}") for family in FAMILIES}
        rows = np.arange(len(codes)) if arm in RETAINED else owners
        features = Features.of_read_outs(tensors, rows, labels, owners, TARGET)
        read = {}
        for split in SPLITS:
            fits = fit_sites(features, split, folds[split])
            probes.append(fits.accuracies(labels, owners, arm=arm.name, split=split))
            read[split] = chosen(fits, folds[split]).predicted.eq(labels).double().mean(0).numpy()
        digits.append(pd.DataFrame({"sample": range(len(codes)), "condition": arm.name, **read}))
        variation += [
            {"arm": arm.name, "family": family, "layer": layer, "variation": varies(of_layer, owners)}
            for family, tensor in tensors.items()
            for layer, of_layer in enumerate(tensor.unbind(1))
            if arm in RETAINED
        ]
    return {
        "digits": pd.concat(digits, ignore_index=True),
        "variation": pd.DataFrame(variation),
        "probes": pd.concat(probes, ignore_index=True).drop(columns="head"),
    }


def varies(features: Float[Tensor, "samples reads dim"], owners: Int[np.ndarray, "samples"]) -> float:
    """How far features vary within conversations, relative to the largest of them."""
    return float(centred_within(features, owners).abs().max() / features.abs().max())
