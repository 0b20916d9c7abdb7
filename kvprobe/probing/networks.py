"""Small networks that are trained to read labels, one or several of each sample, and how they are trained."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from kvprobe.probing.ridge import VARIANCE_FLOOR
from kvprobe.progress import Bar

WIDTH, HEADS, DEPTH = 128, 4, 2
EPOCHS, PATIENCE = 40, 5
"""At most so many passes over the training samples; so many without a lower cross-entropy on the inner fold."""
LEAST_STEPS = 4
_SPHERE = 1e-3
"""Variance that is added in every direction before whitening, for features of unit variance."""


class Descent(NamedTuple):
    """How a reader's weights are trained: samples in a step, how far one goes, how weights decay, and by how many nats
    cross-entropy must fall to be called lower."""

    batch: int = 256
    rate: float = 1e-3
    decay: float = 1e-2
    fall: float = 0.0


class Hidden(nn.Module):
    """One hidden layer."""

    def __init__(self, width: int, targets: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, 2 * WIDTH),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(2 * WIDTH, targets * classes),
            nn.Unflatten(1, (targets, classes)),
        )

    def forward(self, seen: Tensor) -> Tensor:
        return self.layers(seen)


class AttentionPooled(nn.Module):
    """For each label a softmax over slots and layers, by their content and place, and a linear reading of what it
    picks."""

    def __init__(self, layers: int, slots: int, width: int, targets: int, classes: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(layers, targets, width) / width)
        self.place = nn.Parameter(torch.zeros(targets, layers, slots))
        self.value = nn.Parameter(torch.randn(layers, width, WIDTH) / width**0.5)
        self.out = nn.Parameter(torch.zeros(targets, WIDTH, classes))
        self.intercept = nn.Parameter(torch.zeros(targets, classes))

    def forward(self, seen: Float[Tensor, "rows layers slots width"]) -> Float[Tensor, "rows targets classes"]:
        seen = seen.float()
        scores = torch.einsum("blsw,ltw->btls", seen, self.query) + self.place
        weights = scores.flatten(2).softmax(-1).view_as(scores)
        picked = torch.einsum("btls,blsw,lwd->btd", weights, seen, self.value)
        return torch.einsum("btd,tdc->btc", picked, self.out) + self.intercept


class Transformer(nn.Module):
    """A transformer over one token for each slot and layer; the labels are read from tokens of their own."""

    def __init__(self, layers: int, slots: int, width: int, targets: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(layers, width, WIDTH) / width**0.5)
        self.place = nn.Parameter(torch.randn(layers, slots, WIDTH) * 0.02)
        self.asks = nn.Parameter(torch.randn(targets, WIDTH) * 0.02)
        block = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, DEPTH, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, classes)

    def forward(self, seen: Float[Tensor, "rows layers slots width"]) -> Float[Tensor, "rows targets classes"]:
        tokens = (torch.einsum("blsw,lwd->blsd", seen.float(), self.embed) + self.place).flatten(1, 2)
        asks = self.asks.expand(len(seen), -1, -1)
        return self.out(self.blocks(torch.cat([asks, tokens], 1))[:, : len(self.asks)])


def trained(
    network: Callable[[int], nn.Module],
    seen: Shaped[Tensor, "samples *shape"],
    labels: Int[Tensor, "targets samples"],
    folds: Int[Tensor, "samples"],
    seed: int,
    how: Descent,
) -> tuple[Float[Tensor, "targets inner classes"], Float[Tensor, "targets tested classes"]]:
    """The log-probabilities that a network gives to labels of fold 1 and fold 0, once it was trained on fold 2 as long
    as its cross-entropy on fold 1 fell."""
    tested, inner, training = (torch.nonzero(folds == fold)[:, 0] for fold in range(3))
    devices = [seen.device] if seen.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        torch.manual_seed(seed)
        model = network(seen.shape[-1]).to(seen.device)
        optimiser = torch.optim.AdamW(model.parameters(), how.rate, weight_decay=how.decay)
        batch = max(8, min(how.batch, len(training) // LEAST_STEPS))
        best, since, kept = float("inf"), 0, dict[str, Tensor]()
        truth = labels[:, inner][..., None]
        with Bar(range(EPOCHS), desc="Training a reader", unit="epoch", leave=False) as epochs:
            for _ in epochs:
                model.train()
                order = training[torch.randperm(len(training)).to(seen.device)]
                for some in order.split(batch):
                    optimiser.zero_grad()
                    nn.functional.cross_entropy(model(seen[some]).transpose(1, 2), labels[:, some].T).backward()
                    optimiser.step()
                loss = -float(_said(model, seen[inner], how).gather(-1, truth).mean())
                epochs.set_postfix(loss=f"{loss:.3f}")
                since += 1
                if loss < best - how.fall:
                    best, since, kept = loss, 0, {name: value.clone() for name, value in model.state_dict().items()}
                if since == PATIENCE:
                    break
        model.load_state_dict(kept or model.state_dict())
    return _said(model, seen[inner], how), _said(model, seen[tested], how)


def _said(model: nn.Module, seen: Tensor, how: Descent) -> Float[Tensor, "targets rows classes"]:
    model.eval()
    with torch.no_grad():
        return torch.cat([model(some).log_softmax(-1) for some in seen.split(2 * how.batch)]).transpose(0, 1)


def whitening(features: Float[Tensor, "rows sites width"], known: Tensor) -> Float[Tensor, "rows sites width"]:
    """The features of each site in coordinates in which those of the known rows have about unit variance: what a hidden
    channel holds is often in directions of little variance, along which gradient descent would hardly learn."""
    white = torch.empty_like(features)
    for site in range(features.shape[1]):
        here = features[:, site].float()
        mean, deviation = here[known].mean(0), here[known].std(0)
        floor = VARIANCE_FLOOR * here[known].square().mean().sqrt()
        scaled = (here - mean) * torch.where(deviation > floor, 1 / deviation, 0.0)
        seen = scaled[known]
        variance, axes = torch.linalg.eigh((seen.mT @ seen / len(seen)).double())
        # Directions in which no known row varies would otherwise be the largest of a row that does.
        scale = torch.where(variance > VARIANCE_FLOOR, (variance.clamp(min=0) + _SPHERE).rsqrt(), 0.0)
        white[:, site] = scaled @ (axes * scale).to(scaled.dtype)
    return white
