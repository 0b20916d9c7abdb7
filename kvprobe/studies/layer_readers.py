"""Probes of each layer, and the best of them: what readers know of several labels at once."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvprobe.probing.calibration import calibrated_tasks, fit_temperature
from kvprobe.studies.memento_toy.mlp import mlp_scores

LINEAR, MLP = "linear probe", "probe with a hidden layer"
FOLDS = 4


def read_layers(
    features: Float[Tensor, "layers texts _"],
    labels: Int[Tensor, "targets texts"],
    classes: int,
    rng: np.random.Generator | None = None,
) -> pd.DataFrame:
    """Per `reader`, `layer` and `text` the share of labels that is `right`, and the `bits` known of all. As layer −1 a
    reader takes the one that the inner fold chose.

    Labels are uniform, so that of each log2(classes) bits can be known.

    Args:
        rng: trains a probe with a hidden layer, too, which is tested on one fold.
    """
    return pd.concat(_read(features, labels, classes, rng), ignore_index=True)


def _read(features: Tensor, labels: Tensor, classes: int, rng: np.random.Generator | None) -> Iterator[pd.DataFrame]:
    texts = np.arange(labels.shape[1])
    folds = torch.from_numpy(texts % FOLDS)
    (result,) = calibrated_tasks(features, [labels], folds, classes)
    right = result.predicted.eq(labels).double().mean(1)
    bits = (np.log2(classes) - result.bits).double().sum(1)
    for layer in range(len(features)):
        known = {"right": right[layer].numpy(), "bits": bits[layer].numpy()}
        yield pd.DataFrame({"reader": LINEAR, "layer": layer, "text": texts, **known})
    best = result.inner_accuracy.argmax(0)
    chosen = {name: of.gather(0, best[folds][None])[0].numpy() for name, of in (("right", right), ("bits", bits))}
    yield pd.DataFrame({"reader": LINEAR, "layer": -1, "text": texts, **chosen})
    if rng is None:
        return
    test, inner = folds == 0, folds == 1
    of_inner, of_test = mlp_scores(features[best[0]], labels, folds, classes, rng)
    groups = torch.zeros(int(inner.sum()), dtype=torch.long)
    divisor = fit_temperature(of_inner[None], torch.zeros_like(of_inner), labels[:, inner], groups)[0]
    known = (of_test / divisor[..., None]).log_softmax(-1).double()
    # As for linear probes: nothing is known of what is rarer than one in as many samples as chose the temperature.
    rare = 1 / (len(groups) + 1)
    known = torch.logaddexp(known + np.log1p(-rare), torch.full_like(known, np.log(rare / classes)))
    surprisal = -known.gather(2, labels[:, test, None])[..., 0] / np.log(2)
    read = {
        "right": of_test.argmax(2).eq(labels[:, test]).double().mean(0).numpy(),
        "bits": (np.log2(classes) - surprisal).sum(0).numpy(),
    }
    yield pd.DataFrame({"reader": MLP, "layer": -1, "text": texts[test.numpy()], **read})
