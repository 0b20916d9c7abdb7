"""Probes of tiny models, with cards that promise what a test needs."""

import torch

from kvprobe.inference.model import Model
from kvprobe.probes.card import CARD_SPLITS, Arm, Card, Measure, ProbeInput, Training
from kvprobe.probes.probe import Probe
from kvprobe.probing.linear import LinearProbes
from kvprobe.tasks.designs import Target

TARGET = Target("digit", ("0", "1", "2"), ("first", "second"))


def made_probe(
    model: Model,
    where: ProbeInput,
    *,
    leak: float = 0.2,
    far: float = 1e9,
    gain: float | None = 0.1,
    power: float | None = 0.5,
    arm: Arm = "retained",
    name: str = "tiny-digit",
    scale: float = 1.0,
) -> Probe:
    """A probe with random weights, whose card promises 60 % where chance is a third."""
    shape = model.geometry
    heads = 1 if where.head is not None else shape.n_kv_heads
    dim = heads * shape.d_head if where.family in ("k", "v", "k_pre") else shape.d_model
    generator = torch.Generator().manual_seed(0)
    outputs = len(TARGET.classes) * len(TARGET.places)
    rates = torch.tensor([0.5, 0.3, 0.2, 0.2, 0.2, 0.6]).log()
    linear = LinearProbes(
        0.02 * torch.randn(1, dim, generator=generator),
        scale * torch.randn(1, dim, outputs, generator=generator),
        rates[None],
        len(TARGET.classes),
    )
    measures = [Measure("accuracy", split, 0.6, 0.5, 0.7) for split in CARD_SPLITS]
    measures.append(Measure("leak", "leave-context-out", leak, leak - 0.1, leak + 0.1))
    training = Training(
        "leakage", "a digit of a turn that was masked", "T3", arm, typical=1.0, far=far, gain=gain, power=power
    )
    card = Card(
        name,
        TARGET,
        model.name,
        model.fingerprint,
        model.lanes.rounded_fingerprint,
        "float32",
        where,
        training,
        tuple(measures),
    )
    return Probe(card, linear, torch.ones(dim))
