"""Each model reads blocks, is asked for their digits under every arm, and probes read its mementos."""

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.experiments.work import kept
from kvprobe.inference.model import Model, load
from kvprobe.progress import Bar
from kvprobe.studies.layer_readers import read_layers
from kvprobe.studies.lossy_memento import Config
from kvprobe.studies.lossy_memento.reading import RESTART, RETAINED, Trained, answers, caches, trained, vectors
from kvprobe.tasks.lossy_mementos import BASE
from kvprobe.tidy import chosen

MODEL = "the model's answers"
WHOLE = "linear probe of all layers"
TABLES = ANSWERS, PROBES, LAYERS, REACH = "answers", "probes", "layers", "reach"


def collect(model: Model, config: Config, run: Run) -> dict[str, pd.DataFrame]:
    """Tables with columns `asked`, `slots`, `provenance` and `seed` of the model: `answers`, see `reading.answers`, by
    `arm`; `probes`, what each `reader` reads of a block's omitted digits, in the layer that the inner fold chose or
    in all: the share that is `right`, and the `bits`; `layers`, the same of the linear probe by layer; and `reach`, how
    far a restarted memento `varies` with what it omits.

    Raises:
        UserError: two models are of one training, so that their numbers would be mixed.
    """
    given = list(dict.fromkeys([config.model, *config.beside]))
    names: dict[Trained, str] = {}
    for name in given:
        if (first := names.setdefault(trained(loaded(model, config, name)), name)) != name:
            raise UserError(f"{first} and {name} are of the same design, training and seed; name one of them.")
    rows = Parts(model, config, run).table(read_model, given, "model", doing="Reading models", unit="model")
    return {name: chosen(rows, {"table": name}).dropna(axis=1, how="all") for name in TABLES}


@kept
def loaded(model: Model, config: Config, name: str) -> Model:
    """The model of this name, which may be the main one."""
    return model if name == config.model else load(name, **config.loading)


def read_model(main: Model, config: Config, name: str) -> pd.DataFrame:
    """All tables of one model, one below the other."""
    model = loaded(main, config, name)
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
    """What probes read of the omitted digits in the slots of a memento, layer by layer and in all layers."""
    read = read_layers(features, labels, BASE, rng if config.mlp else None)
    whole = read_layers(features.transpose(0, 1).flatten(1)[None], labels, BASE)
    read = pd.concat([read, chosen(whole, {"layer": -1}).assign(reader=WHOLE)], ignore_index=True)
    return read.rename(columns={"text": "trace"}).assign(arm=arm, table=np.where(read["layer"] < 0, PROBES, LAYERS))
