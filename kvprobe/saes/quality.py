"""How good a dictionary is: what it leaves unexplained, how many latents it takes, and what the model loses by it.

The last is the test that counts. The reconstruction takes the place of what the model computes, at every slot but the first, and the
model predicts each next token from it: for K and V that is the cache as later tokens find it. The loss may hardly notice one layer's K
or V, and then a share of it means little; so the share recovered is of the KL that the mean activation makes in its place.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from tqdm import tqdm

from kvprobe.errors import UserError
from kvprobe.inference.capture import editing
from kvprobe.inference.model import Model
from kvprobe.saes.dictionary import Dictionary
from kvprobe.saes.places import site_of
from kvprobe.saes.shards import FIRST, at_places
from kvprobe.text.transcript import Tokens


@dataclass(frozen=True)
class Reconstruction:
    """What a dictionary makes of texts.

    Attributes:
        texts: one row per text: `tokens` that were reconstructed, their summed squared `error` and squared distance from the mean
            activation (`variance`), and their `active` latents in all.
        density: share of all tokens in which each latent is active.
    """

    texts: pd.DataFrame
    density: Float[np.ndarray, "width"]

    @property
    def unexplained(self) -> float:
        """Share of the variance that is not in the reconstruction; above 1 it is worse than the mean."""
        return self._total("error") / self._total("variance")

    @property
    def active(self) -> float:
        """Latents that are active in a token, on average."""
        return self._total("active") / self._total("tokens")

    @property
    def dead(self) -> int:
        """Latents that are active nowhere in these texts."""
        return int((self.density == 0).sum())

    def _total(self, column: str) -> float:
        return float(self.texts[column].to_numpy(float).sum())


def reconstruction(model: Model, features: Dictionary, texts: Sequence[Tokens]) -> Reconstruction:
    """How much of what the model computes at the dictionary's place is in the reconstruction, and by how many latents."""
    read = _read(model, features, texts)
    mean = torch.cat(read).mean(0)
    rows, fired = [], torch.zeros(features.width, device=model.lanes.device)
    for activations in read:
        latents = features.encode(activations)
        fired += (latents != 0).sum(0)
        rows.append(
            {
                "tokens": len(activations),
                "error": float((features.decode(latents) - activations).square().sum()),
                "variance": float((activations - mean).square().sum()),
                "active": int((latents != 0).sum()),
            }
        )
    return Reconstruction(pd.DataFrame(rows), (fired / sum(map(len, read))).cpu().numpy())


def splice(model: Model, features: Dictionary, texts: Sequence[Tokens]) -> pd.DataFrame:
    """What the model loses when it goes on with the reconstruction.

    Returns:
        One row per text: the tokens `predicted`, and in nats, summed over them, the loss as it is (`clean`) and with the reconstruction
        (`spliced`), the `mean` activation of these texts and `zero` in place; and for these three the KL from the clean predictions
        (`kl_spliced` …).
    """
    site, mean = site_of(model.lanes, features.place), torch.cat(_read(model, features, texts)).mean(0)
    edits = {"spliced": features.splicing(), "mean": constant(mean), "zero": constant(torch.zeros_like(mean))}
    rows = []
    for text in tqdm(texts, desc=f"Splicing in {features.place}", unit="text"):
        targets = torch.tensor(text.ids[FIRST + 1 :], device=model.lanes.device)[:, None]
        clean = _predictions(model, text)
        row = {"predicted": len(targets), "clean": -float(clean.gather(1, targets).sum())}
        for name, edit in edits.items():
            with editing(model.lanes, site, edit):
                edited = _predictions(model, text)
            row[name] = -float(edited.gather(1, targets).sum())
            row[f"kl_{name}"] = float((clean.exp() * (clean - edited)).sum())
        rows.append(row)
    return pd.DataFrame(rows)


def recovered(spliced: Any) -> float:
    """Of what `splice` found: the share of the KL that the mean activation makes which the reconstruction does not make."""
    return 1 - float(spliced["kl_spliced"].sum() / spliced["kl_mean"].sum())


def _predictions(model: Model, text: Tokens) -> Float[Tensor, "predicted vocab"]:
    """Log-probabilities of all tokens after each slot that a dictionary may have changed, but for the last."""
    _, logits = model.extend(None, text[:-1], logits=len(text) - 1 - FIRST)
    return logits[0].float().log_softmax(-1)


def constant(value: Float[Tensor, "dim"]) -> Callable[[Tensor], Tensor]:
    """For `kvprobe.inference.capture.editing`: this in place of every slot but the first."""

    def edit(tensor: Tensor) -> Tensor:
        edited = tensor.flatten(2).clone()
        edited[:, FIRST:] = value
        return edited.view_as(tensor)

    return edit


def _read(model: Model, features: Dictionary, texts: Sequence[Tokens]) -> list[Float[Tensor, "tokens dim"]]:
    """What stands at the dictionary's place in each text but for the first slots."""
    if not texts or min(map(len, texts)) < FIRST + 2:
        raise UserError(f"A text needs {FIRST + 2} tokens or more to be reconstructed and predicted; give longer ones.")
    place, site = features.place, site_of(model.lanes, features.place)
    return [at_places(model.lanes, [text], {place: site})[place][0, FIRST:].float() for text in texts]
