"""Do the latents in which two runs differ matter to what is predicted? Some are moved to what the other run has.

Both runs read the same tokens, slot by slot. What a set of latents makes of their difference is added to what the one
run computes; the whole difference is the most that can pass at the dictionary's place.
"""

from collections.abc import Mapping, Sequence

import pandas as pd
import torch

from kvprobe.arguments import checked_arguments
from kvprobe.cache.cache import KVCache
from kvprobe.inference.capture import Captured, editing
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import relative_entropy
from kvprobe.saes.dictionary import Dictionary
from kvprobe.saes.places import joined, port_of
from kvprobe.text.tokens import Tokens


@checked_arguments
def exchange_latents(
    model: Model,
    dictionary: Dictionary,
    past: KVCache,
    asked: Tokens,
    own: Captured,
    other: Captured,
    sets: Mapping[str, Sequence[int]],
) -> pd.DataFrame:
    """KL in nats from the other run's predictions, mean over slots (`kl`), by what is exchanged (`set`): nothing
    (`as it is`), the `whole` activations, and each set of latents.

    Args:
        past: before `asked`, of the run in which latents are exchanged.
        own, other: what the two runs compute at the dictionary's place while they read `asked`; of the other one the
            logits after each of these tokens, too.
    """
    place = dictionary.place
    here, there = (joined(captured[place.family, place.layer])[0].float() for captured in (own, other))
    moved, directions = dictionary.encode(there) - dictionary.encode(here), dictionary.directions
    shifts = {"as it is": torch.zeros_like(here), "whole": there - here}
    for name, latents in sets.items():
        columns = torch.tensor(list(latents), dtype=torch.long, device=moved.device)
        shifts[name] = moved[:, columns] @ directions[columns]
    shift = torch.stack(list(shifts.values()))
    edit = (port_of(model.lanes, place), lambda tensor: tensor + shift.to(tensor).view(tensor.shape))
    with editing(model.lanes, [edit]):
        _, logits = model.extend(past, [asked] * len(shifts), logits=len(asked))
    predicted = logits.float().log_softmax(-1)
    target = other.logits[0].float().log_softmax(-1)
    kl = relative_entropy(target.expand_as(predicted), predicted).mean(1)
    return pd.DataFrame({"set": shifts.keys(), "kl": kl.tolist()})
