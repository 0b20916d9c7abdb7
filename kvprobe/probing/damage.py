"""Whether a slot is damaged, as a target for probes: is the damage readable in the slot itself?"""

from collections.abc import Mapping

import numpy as np
import torch

from kvprobe.errors import UserError
from kvprobe.faults.draws import Draws
from kvprobe.faults.fault import Fault
from kvprobe.inference.model import Model
from kvprobe.probing.features import Features, Site
from kvprobe.progress import Bar
from kvprobe.tasks.designs import Target
from kvprobe.text.transcript import Transcript

SOUND_OR_DAMAGED = Target("slot", ("sound", "damaged"))


def damaged_slots(
    model: Model, transcripts: Mapping[str, Transcript], fault: Fault, at: str, seed: int = 0
) -> Features:
    """K and V of every slot of segment `at` after a fault struck some of them, with labels that say which slots it
    struck.

    The fault's own scope decides where it strikes. A slot counts as damaged if K or V changed at any layer, so the
    damage of one layer can be looked for in all layers. The result is input for `kvprobe.probing.probe_features`.

    Args:
        transcripts: by context.
        seed: of the fault's draws; each conversation has draws of its own.

    Raises:
        UserError: the fault struck every slot of `at` or none of them.
    """
    vectors: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    labels, contexts = [], []
    for number, transcript in enumerate(Bar(transcripts.values(), desc="Damaging caches", unit="conversation")):
        tokens = transcript.tokens(model.tokenizer)
        span = tokens.span(at)
        sound = model.prefill(tokens[: span.stop])
        damaged = sound.corrupt(fault, draws=[Draws(seed, number)])
        struck_slots = torch.zeros(span.stop - span.start, dtype=torch.bool)
        for part, before, after in (("k", sound.keys, damaged.keys), ("v", sound.values, damaged.values)):
            layers = torch.stack([layer[0, :, span] for layer in after]).cpu()
            was = torch.stack([layer[0, :, span] for layer in before]).cpu()
            struck_slots |= (layers != was).any(-1).any(1).any(0)
            vectors[part].append(layers.float().permute(2, 0, 1, 3).flatten(2))
        labels.append(struck_slots.long())
        contexts += [number] * len(struck_slots)
    whole = torch.cat(labels)
    if len(whole.unique()) < 2:
        raise UserError(
            f"The fault struck {'every' if bool(whole[0]) else 'no'} slot of segment {at!r}; give it a scope that "
            "strikes some slots."
        )
    sites = tuple(Site(layer, None, "slot") for layer in range(model.geometry.n_layers))
    return Features(
        {"k": torch.cat(vectors["k"]), "v": torch.cat(vectors["v"])},
        {"k": sites, "v": sites},
        np.arange(len(whole)),
        whole[None],
        np.array(contexts),
        SOUND_OR_DAMAGED,
    )
