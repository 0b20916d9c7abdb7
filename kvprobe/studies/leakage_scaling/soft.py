"""A reader that is the model itself: a soft prompt, trained until the model says the code after it.

It is read after a segment's slots, with nothing but the system prompt before these, as the neutral question is. The
weights stay as they are; what is learnt is a few vectors in place of the embeddings of tokens.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvprobe.cache.cache import KVCache
from kvprobe.cache.entries import entries
from kvprobe.inference.forward import new_slots, taps
from kvprobe.inference.model import Model
from kvprobe.models.hf_cache import past_key_values
from kvprobe.models.hooks import hooked
from kvprobe.probing.networks import Descent
from kvprobe.probing.readers import Evidence, Known, Labels, learned
from kvprobe.restoring import restoring
from kvprobe.studies.leakage_scaling.reading import digit_ids
from kvprobe.text.tokens import Tokens

VECTORS = 16
DESCENT = Descent(batch=16, rate=0.1, decay=0.0, fall=0.01)
"""The rate is in units of the spread of embeddings."""


class SoftPrompt(nn.Module):
    """Vectors that are read after the slots of a cache's rows, at first those of random tokens; then the digits of each
    row's code are read one by one, whatever the model said of those before (teacher forcing)."""

    def __init__(self, model: Model, past: KVCache, codes: Labels) -> None:
        super().__init__()
        self._lanes, self._past, self._digits = model.lanes, past, digit_ids(model)
        starts = entries(past.ledger.following, int)
        texts = [[self._digits[digit] for digit in code[:-1]] for code in codes.T.tolist()]
        self._texts = [
            Tokens.of([0] * VECTORS + text, "soft", start) for text, start in zip(texts, starts, strict=True)
        ]
        embeddings: Any = self._lanes.plain.get_input_embeddings()
        tokens = torch.randint(embeddings.num_embeddings, (VECTORS,)).to(self._lanes.device)
        first = embeddings(tokens).detach().float()
        self.scale = first.std()
        self.vectors = nn.Parameter(first / self.scale)

    def forward(self, rows: Int[Tensor, "rows"]) -> Float[Tensor, "rows targets classes"]:
        numbers = rows.tolist()
        past = self._past.rows(numbers)
        new = new_slots([self._texts[number] for number in numbers], self._lanes.device)
        layers = past_key_values(taps(self._lanes, past, store=False))
        targets = new.slots - VECTORS + 1

        def prompted(_: object, __: object, embedded: Tensor) -> Tensor:
            vectors = (self.scale * self.vectors).to(embedded.dtype).expand(len(embedded), -1, -1)
            return torch.cat([vectors, embedded[:, VECTORS:]], 1)

        with hooked([(self._lanes.plain.get_input_embeddings(), "output", prompted)]):
            logits = self._lanes.forward(new.tokens, past.ledger.append(new), layers, logits_to_keep=targets)
        return logits[..., self._digits].float()


def soft_reader(model: Model, past: KVCache, codes: Labels) -> Callable[[Known], Evidence]:
    """A reader whose features are numbers of a cache's rows, the codes of all of which are given."""

    def reading(known: Known) -> Evidence:
        with _frozen(model.lanes.plain):
            return learned(known, known.features, lambda _: SoftPrompt(model, past, codes), DESCENT)

    return reading


@contextmanager
def _frozen(network: nn.Module) -> Generator[None]:
    """While this lasts, no weight has a gradient."""
    free = [weight for weight in network.parameters() if weight.requires_grad]
    with restoring(lambda: [weight.requires_grad_() for weight in free]):
        network.requires_grad_(False)
        yield
