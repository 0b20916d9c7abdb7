"""Batched L-BFGS for softmax regression: every probe and target goes down its own slope, all in the same products.

It starts from the Hessian where all classes are equally likely, which is diagonal in the principal axes of the features
(Nocedal and Wright 2006, algorithm 7.4), so that the first step is nearly Newton's and a few more suffice. Every probe and
target takes, halves or ends its own steps; those that have converged are frozen, and soon left out.
"""

import warnings
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_PAIRS = 8  # steps that are remembered
_STEPS = 200
_SMALLEST_STEP = 2.0**-12


def minimised(
    loss: "SoftmaxLoss",
    start: Float[Tensor, "probes axes targets classes"],
    penalty: Float[Tensor, "probes targets"],
    tolerance: float,
) -> Float[Tensor, "probes axes targets classes"]:
    """The weights of least penalised cross-entropy.

    Args:
        penalty: half of it times the squared weights is added to the cross-entropy, the last axis left free.
        tolerance: largest entry of the gradient at which a probe and target has converged.
    """
    found = start.clone()
    left = torch.arange(len(start), device=start.device)
    state = _State.at(loss, start, penalty, tolerance)
    for _ in range(_STEPS):
        if not bool(state.active.any()):
            break
        going = state.active.any(1)
        # Leaving probes out copies those that stay, so it waits until half of them can go.
        if 2 * int(going.sum()) <= len(going):
            found[left] = state.weights
            left, state = left[going], state.only(going)
        state.step(tolerance)
    found[left] = state.weights
    late = int(state.active.sum())
    if late:
        warnings.warn(
            f"{late} of {start.shape[0] * start.shape[2]} logistic probes have not converged in {_STEPS} steps; raise "
            "the smallest penalty or the tolerance.",
            stacklevel=2,
        )
    return found


@dataclass(frozen=True)
class SoftmaxLoss:
    """Penalised cross-entropy of a training set, of which the labels enter by the sums of each class only.

    Attributes:
        points: features along their principal axes, the last axis all ones.
        sums: mean over the samples of points × one-hot label.
        variance: mean square of the points along each axis.
    """

    points: Float[Tensor, "probes axes samples"]
    sums: Float[Tensor, "probes axes targets classes"]
    variance: Float[Tensor, "probes axes"]

    def only(self, kept: Bool[Tensor, "probes"]) -> "SoftmaxLoss":
        return SoftmaxLoss(self.points[kept], self.sums[kept], self.variance[kept])

    def __call__(
        self,
        weights: Float[Tensor, "probes axes targets classes"],
        penalty: Float[Tensor, "probes axes targets 1"],
    ) -> tuple[Float[Tensor, "probes targets"], Float[Tensor, "probes axes targets classes"]]:
        """Value and gradient."""
        targets, classes = weights.shape[2:]
        samples = self.points.shape[2]
        # Classes before samples: the softmax then runs along vectors of samples.
        scores = (weights.flatten(2).mT @ self.points).unflatten(1, (targets, classes))
        top = scores.amax(2, keepdim=True)
        likely = scores.sub_(top).exp_()
        total = likely.sum(2, keepdim=True)
        entropy = (total.log() + top).mean((2, 3))
        likely.div_(total)
        expected = (self.points @ likely.flatten(1, 2).mT).div_(samples).unflatten(2, (targets, classes))
        shrunk = penalty * weights
        loss = entropy + (weights * (shrunk / 2 - self.sums)).sum((1, 3))
        return loss, expected - self.sums + shrunk


@dataclass
class _State:
    """Where every probe and target stands in its own descent."""

    loss: SoftmaxLoss
    penalty: Float[Tensor, "probes axes targets 1"]
    weights: Float[Tensor, "probes axes targets classes"]
    value: Float[Tensor, "probes targets"]
    gradient: Float[Tensor, "probes axes targets classes"]
    direction: Float[Tensor, "probes axes targets classes"]
    length: Float[Tensor, "probes targets"]
    gain: Float[Tensor, "probes targets"]
    active: Bool[Tensor, "probes targets"]
    pairs: list[tuple[Tensor, Tensor, Tensor]]

    @classmethod
    def at(
        cls,
        loss: SoftmaxLoss,
        weights: Float[Tensor, "probes axes targets classes"],
        penalty: Float[Tensor, "probes targets"],
        tolerance: float,
    ) -> "_State":
        wide = penalty[:, None, :, None].repeat(1, weights.shape[1], 1, 1)
        wide[:, -1] = 0
        value, gradient = loss(weights, wide)
        active = gradient.abs().amax((1, 3)) > tolerance
        one = torch.ones_like(value)
        state = cls(loss, wide, weights, value, gradient, gradient, one, one.clone(), active, [])
        state.direction = state.newton()
        return state

    def only(self, kept: Bool[Tensor, "probes"]) -> "_State":
        return _State(
            self.loss.only(kept),
            self.penalty[kept],
            self.weights[kept],
            self.value[kept],
            self.gradient[kept],
            self.direction[kept],
            self.length[kept],
            self.gain[kept],
            self.active[kept],
            [(move[kept], turn[kept], weight[kept]) for move, turn, weight in self.pairs],
        )

    def step(self, tolerance: float) -> None:
        """Try one step; those that it does not help enough try half of it next time."""
        trial = self.weights + self.length[:, None, :, None] * self.direction
        value, gradient = self.loss(trial, self.penalty)
        slope = _inner(self.direction, self.gradient)
        # Close to the minimum a step gains less than the round-off of the value.
        slack = 8 * torch.finfo(value.dtype).eps * (1 + self.value.abs())
        taken = self.active & (value <= self.value + 1e-4 * self.length * slope + slack)
        wide = taken[:, None, :, None]
        move = torch.where(wide, trial - self.weights, 0.0)
        turn = torch.where(wide, gradient - self.gradient, 0.0)
        curvature = _inner(move, turn)
        useful = curvature > 0
        # A pair of no weight, where nothing was learned, leaves the two loops as they are.
        self.pairs = [*self.pairs, (move, turn, torch.where(useful, 1 / curvature, 0.0))][-_PAIRS:]
        self.gain = torch.where(useful, curvature / _inner(turn, self.preconditioned(turn)), self.gain)
        self.weights = self.weights + move
        self.gradient = self.gradient + turn
        self.value = torch.where(taken, value, self.value)
        self.length = torch.where(taken, 1.0, self.length / 2)
        self.active = self.active & (self.gradient.abs().amax((1, 3)) > tolerance) & (self.length > _SMALLEST_STEP)
        self.direction = torch.where(wide, self.newton(), self.direction)

    def newton(self) -> Float[Tensor, "probes axes targets classes"]:
        """The direction of descent, by the two loops over the remembered pairs."""
        ahead, shares = -self.gradient, []
        for move, turn, weight in reversed(self.pairs):
            share = weight * _inner(move, ahead)
            ahead = ahead - share[:, None, :, None] * turn
            shares.append(share)
        ahead = self.gain[:, None, :, None] * self.preconditioned(ahead)
        for (move, turn, weight), share in zip(self.pairs, reversed(shares), strict=True):
            ahead = ahead + (share - weight * _inner(turn, ahead))[:, None, :, None] * move
        return ahead

    def preconditioned(
        self, vector: Float[Tensor, "probes axes targets classes"]
    ) -> Float[Tensor, "probes axes targets classes"]:
        """A vector over the Hessian at zero weights, where every class is equally likely."""
        classes = vector.shape[3]
        return vector / (self.loss.variance[:, :, None, None] / classes + self.penalty)


def _inner(
    one: Float[Tensor, "probes axes targets classes"], other: Float[Tensor, "probes axes targets classes"]
) -> Float[Tensor, "probes targets"]:
    return (one * other).sum((1, 3))
