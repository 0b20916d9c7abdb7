"""A base and a donor, swept with a metric to which every logit contributes."""

from typing import Any

import torch
from torch import Tensor

from kvprobe.inference.model import Model
from kvprobe.patching import PatchMap, patch_sweep
from kvprobe.text.tokens import Tokens
from tests.models import VOCABULARY
from tests.patching.oracle import Run

TOLERANCE = 1e-5
"""Of a metric that weighs logits, none of which is above 5; the promise is 1e-4."""
WEIGHTS = torch.nn.functional.normalize(torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0)), dim=0)
SPANS = {"system": 4, "T1": 6, "T2": 3}


def weighed(logits: Tensor) -> Tensor:
    """A number to which every logit contributes."""
    return logits[-1] @ WEIGHTS


def near(actual: Any, expected: Any) -> bool:
    actual, expected = (
        value.float() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)
        for value in (actual, expected)
    )
    return actual.shape == expected.shape and bool(((actual - expected).abs() < TOLERANCE).all())


def two(model: Model, spans: dict[str, int] = SPANS) -> tuple[Run, Run]:
    """A base and a donor of these segments, never edited."""
    return Run(model, 1).read(spans), Run(model, 2).read(spans)


def swept(base: Run, donor: Run, suffix: Tokens, metric: Any = weighed, **settings: Any) -> PatchMap:
    return patch_sweep(base.model, base.cache, donor.cache, suffix, metric, progress=False, **settings)
