"""How good a dictionary is: what it leaves unexplained, how many latents it takes, and what the model loses by it.

The last is the most important test. The reconstruction replaces what the model computes, at every slot but the first,
and the model predicts each next token from it; for K and V, later tokens find the reconstruction in the cache. The loss
may hardly change with one layer's K or V, and then a share of it means little. The share recovered is therefore of the
KL that the mean activation causes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.arguments import checked_arguments
from kvprobe.errors import UserError
from kvprobe.inference.capture import editing
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import relative_entropy
from kvprobe.progress import Bar
from kvprobe.saes.dictionary import Dictionary
from kvprobe.saes.places import port_of
from kvprobe.saes.shards import FIRST, at_places
from kvprobe.text.tokens import Tokens


@dataclass(frozen=True)
class Reconstruction:
    """How well a dictionary reconstructs texts.

    Attributes:
        texts: one row per text: `tokens` that were reconstructed, their summed squared `error` and squared distance
            from the mean activation (`variance`), and the sum of their `active` latents.
        density: share of all tokens in which each latent is active.
    """

    texts: pd.DataFrame
    density: Float[np.ndarray, "width"]

    @property
    def unexplained(self) -> float:
        """Share of the variance that is not in the reconstruction; above 1 it is worse than the mean, and NaN where all
        activations are alike."""
        variance = self._total("variance")
        return self._total("error") / variance if variance else np.nan

    @property
    def active(self) -> float:
        """Latents that are active in a token, on average."""
        return self._total("active") / self._total("tokens")

    def _total(self, column: str) -> float:
        return float(self.texts[column].to_numpy(float).sum())


@checked_arguments
def reconstruction(model: Model, dictionary: Dictionary, texts: Sequence[Tokens]) -> Reconstruction:
    """How much of what the model computes at the dictionary's place is in the reconstruction, and by how many
    latents."""
    by_text = _activations(model, dictionary, texts)
    mean = torch.cat(by_text).mean(0)
    rows, fired = [], torch.zeros(dictionary.width, device=model.lanes.device)
    for activations in by_text:
        latents = dictionary.encode(activations)
        fired += (latents != 0).sum(0)
        rows.append(
            {
                "tokens": len(activations),
                "error": float((dictionary.decode(latents) - activations).square().sum()),
                "variance": float((activations - mean).square().sum()),
                "active": int((latents != 0).sum()),
            }
        )
    return Reconstruction(pd.DataFrame(rows), (fired / sum(map(len, by_text))).cpu().numpy())


@checked_arguments
def splice(model: Model, dictionary: Dictionary, texts: Sequence[Tokens]) -> pd.DataFrame:
    """What the model loses when it goes on from the reconstruction.

    Returns:
        One row per text: the number of tokens `predicted`; in nats, summed over them, the loss of the model itself
        (`clean`), with the reconstruction in place (`spliced`), with the `mean` activation of these texts and with
        `zero`; and for the last three the KL from the clean predictions (`kl_spliced` …).
    """
    port = port_of(model.lanes, dictionary.place)
    mean = torch.cat(_activations(model, dictionary, texts)).mean(0)
    edits = {"spliced": dictionary.splicing(), "mean": _constant(mean), "zero": _constant(torch.zeros_like(mean))}
    rows = []
    for text in Bar(texts, desc=f"Splicing in {dictionary.place}", unit="text"):
        targets = torch.tensor(text.ids[FIRST + 1 :], device=model.lanes.device)[:, None]
        clean = _predictions(model, text)
        row = {"predicted": len(targets), "clean": -float(clean.gather(1, targets).sum())}
        for name, edit in edits.items():
            with editing(model.lanes, [(port, edit)]):
                edited = _predictions(model, text)
            row[name] = -float(edited.gather(1, targets).sum())
            row[f"kl_{name}"] = float(relative_entropy(clean, edited).sum())
        rows.append(row)
    return pd.DataFrame(rows)


@checked_arguments
def judge(model: Model, dictionary: Dictionary, texts: Sequence[Tokens], seed: int, spliced: int) -> Reconstruction:
    """What `reconstruction` gives, with more columns in its table of texts: `turned`, the error of the dictionary
    rotated at random, and, for so many of the first texts, what `splice` gives.

    Args:
        seed: of the rotation.
    """
    quality, turned = (reconstruction(model, judged, texts) for judged in (dictionary, dictionary.rotated(seed)))
    rows = quality.texts.assign(turned=turned.texts["error"])
    return replace(quality, texts=rows.join(splice(model, dictionary, texts[:spliced])))


def by_density(density: Float[np.ndarray, "width"], step: float) -> dict[float, int]:
    """How many latents are active in which share of tokens, by the logarithm of the share: the lower ends of steps of
    this width, in powers of ten. Latents that are never active are left out."""
    steps = np.floor(np.log10(density[density > 0]) / step).astype(int)
    first = int(steps.min(initial=0))
    return {(first + number) * step: int(count) for number, count in enumerate(np.bincount(steps - first))}


def recovered(spliced: pd.DataFrame) -> float:
    """From the table of `splice`: 1 − (KL with the reconstruction in place) / (KL with the mean activation in
    place).

    Raises:
        UserError: the mean activation changes nothing, so there is nothing to recover.
    """
    with_reconstruction, with_mean = spliced[["kl_spliced", "kl_mean"]].to_numpy(float).sum(0)
    if not with_mean > 0:
        raise UserError(
            "With the mean activation in place the model predicts as before (KL 0), so the share recovered of that is "
            "undefined; judge the dictionary on texts whose activations differ."
        )
    return 1 - float(with_reconstruction / with_mean)


def _predictions(model: Model, text: Tokens) -> Float[Tensor, "predicted vocab"]:
    """Log-probabilities of the next token after each slot that a dictionary may change, except the last slot."""
    _, logits = model.extend(None, text[:-1], logits=len(text) - 1 - FIRST)
    return logits[0].float().log_softmax(-1)


def _constant(value: Float[Tensor, "dim"]) -> Callable[[Tensor], Tensor]:
    """For `kvprobe.inference.capture.editing`: this value in every slot but the first."""

    def edit(tensor: Tensor) -> Tensor:
        edited = tensor.flatten(2).clone()
        edited[:, FIRST:] = value
        return edited.view_as(tensor)

    return edit


def _activations(model: Model, dictionary: Dictionary, texts: Sequence[Tokens]) -> list[Float[Tensor, "tokens dim"]]:
    """The activations of each text at the dictionary's place, without the first slots."""
    if not texts or min(map(len, texts)) < FIRST + 2:
        raise UserError(f"A text needs {FIRST + 2} tokens or more to be reconstructed and predicted; give longer ones.")
    place, port = dictionary.place, port_of(model.lanes, dictionary.place)
    return [at_places(model.lanes, [text], {place: port})[place][0, FIRST:].float() for text in texts]
