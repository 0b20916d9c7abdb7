"""Each model reads blocks, is asked for their digits under every arm, and probes read its mementos."""

from collections.abc import Mapping
from functools import partial

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model, load
from kvprobe.probing.calibration import calibrated_tasks, fit_temperature
from kvprobe.progress import Bar
from kvprobe.studies.lossy_memento import Config
from kvprobe.studies.lossy_memento.reading import RESTART, RETAINED, Trained, answers, caches, trained, vectors
from kvprobe.studies.memento_toy.mlp import mlp_scores
from kvprobe.tasks.lossy_mementos import BASE, BITS
from kvprobe.tidy import chosen

LINEAR, MLP, MODEL = "linear probe", "probe with a hidden layer", "the model's answers"
FOLDS = 4
TABLES = ANSWERS, PROBES, LAYERS, REACH = "answers", "probes", "layers", "reach"


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables with columns `asked`, `slots`, `provenance` and `seed` of the model: `answers`, see `reading.answers`, by
    `arm`; `probes`, what each `reader` reads of a block's omitted digits in the layer that the inner fold chose: the
    share that is `right`, and the `bits`; `layers`, the same of the linear probe by layer; and `reach`, how far a
    restarted memento `varies` with what it omits.

    Raises:
        UserError: two models are of one training, so that their numbers would be mixed.
    """
    given = {config.model: lambda: model} | {
        name: partial(load, name, device=config.device, dtype=config.dtype) for name in config.others or ()
    }
    names: dict[Trained, str] = {}
    for name, loaded in given.items():
        if (first := names.setdefault(trained(loaded()), name)) != name:
            raise UserError(f"{first} and {name} are of the same design, training and seed; name one of them.")
    rows = table_of_parts(
        run,
        list(given),
        "model",
        lambda name: read_model(given[name](), config),
        doing="Reading models",
        unit="model",
    )
    return {name: chosen(rows, {"table": name}).dropna(axis=1, how="all") for name in TABLES}


def read_model(model: Model, config: Config) -> pd.DataFrame:
    """All tables of one model, one below the other."""
    known = trained(model)
    design, rng = known.design, np.random.default_rng([config.seed, known.asked, known.slots])
    digits = design.draw(config.traces, rng)
    others = design.alike(digits, rng)
    read: dict[str, list[Tensor]] = {RETAINED: [], RESTART: []}
    tables, varies = [], 0.0
    for start in Bar(range(0, config.traces, config.batch), desc=f"Asking {model.name}", unit="batch"):
        some = slice(start, start + config.batch)
        for arm, cache in (by_arm := caches(model, design, digits[some], others[some])).items():
            rows = answers(model, design, cache, digits[some], others[some])
            tables.append(rows.assign(table=ANSWERS, arm=arm, trace=rows["trace"] + start))
        for arm, parts in read.items():
            parts.append(vectors(by_arm[arm]))
        again = vectors(caches(model, design, others[some], digits[some])[RESTART])
        varies = max(varies, float((again - read[RESTART][-1]).abs().max() / again.abs().max()))
    tables.append(pd.DataFrame({"table": [REACH], "varies": [varies]}))
    labels = torch.from_numpy(digits[:, design.stated :].T.copy())
    rng = np.random.default_rng([config.seed, 1])
    tables += [probe(torch.cat(parts, 1), labels, arm, config, rng) for arm, parts in read.items()]
    return pd.concat(tables, ignore_index=True).assign(**vars(known))


def probe(
    features: Tensor, labels: Int[Tensor, "digits traces"], arm: str, config: Config, rng: np.random.Generator
) -> pd.DataFrame:
    """What probes read of the omitted digits in the slots of a memento, layer by layer."""
    traces = np.arange(labels.shape[1])
    folds = torch.from_numpy(traces % FOLDS)
    (result,) = calibrated_tasks(features, [labels], folds, BASE)
    right, bits = result.predicted.eq(labels).double().mean(1), (BITS - result.bits).double().sum(1)
    tables = [
        pd.DataFrame({"table": LAYERS, "layer": layer, "trace": traces, "right": right[layer], "bits": bits[layer]})
        for layer in range(len(features))
    ]
    best = result.inner_accuracy.argmax(0)
    best_layer: Mapping[str, np.ndarray] = {
        name: of.gather(0, best[folds][None])[0].numpy() for name, of in (("right", right), ("bits", bits))
    }
    tables.append(pd.DataFrame({"table": PROBES, "reader": LINEAR, "trace": traces, **best_layer}))
    if config.mlp:
        test, inner = folds == 0, folds == 1
        of_inner, of_test = mlp_scores(features[best[0]], labels, folds, BASE, rng)
        groups = torch.zeros(int(inner.sum()), dtype=torch.long)
        divisor = fit_temperature(of_inner[None], torch.zeros_like(of_inner), labels[:, inner], groups)[0]
        known = (of_test / divisor[..., None]).log_softmax(-1).double()
        # As for linear probes: nothing is known of what is rarer than one in as many samples as chose the temperature.
        rare = 1 / (len(groups) + 1)
        known = torch.logaddexp(known + np.log1p(-rare), torch.full_like(known, np.log(rare / BASE)))
        surprisal = -known.gather(2, labels[:, test, None])[..., 0] / np.log(2)
        read = {
            "right": of_test.argmax(2).eq(labels[:, test]).double().mean(0).numpy(),
            "bits": (BITS - surprisal).sum(0).numpy(),
        }
        tables.append(pd.DataFrame({"table": PROBES, "reader": MLP, "trace": traces[test.numpy()], **read}))
    return pd.concat(tables, ignore_index=True).assign(arm=arm)
