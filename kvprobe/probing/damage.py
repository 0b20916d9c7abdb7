"""Whether a slot is damaged, as something to be probed: can the damage be seen in the slot itself?"""

from collections.abc import Mapping

import numpy as np
import torch
from tqdm import tqdm

from kvprobe.errors import UserError
from kvprobe.faults.draws import Draws
from kvprobe.faults.fault import Fault
from kvprobe.inference.model import Model
from kvprobe.probing.features import Features, Site
from kvprobe.tasks.designs import Target
from kvprobe.text.transcript import Transcript

SOUND_OR_DAMAGED = Target("slot", ("sound", "damaged"))


def damaged_slots(
    model: Model, transcripts: Mapping[str, Transcript], fault: Fault, at: str, seed: int = 0
) -> Features:
    """K and V of every slot of segment `at` after a fault struck some of them, and which it struck.

    The fault's own scope says where it strikes. A slot counts as damaged if K or V changed at any layer, so a fault of one
    layer can be looked for in all of them. To be given to `kvprobe.probing.claims.probe_features`.

    Args:
        transcripts: by context.
        seed: of the fault's draws; each conversation has draws of its own.

    Raises:
        UserError: the fault struck every slot of `at` or none of them.
    """
    vectors: dict[str, list[torch.Tensor]] = {"k": [], "v": []}
    labels, contexts = [], []
    for number, transcript in enumerate(tqdm(transcripts.values(), desc="Damaging caches", unit="conversation")):
        tokens = transcript.tokens(model.tokenizer)
        span = tokens.span(at)
        sound = model.prefill(tokens[: span.stop])
        struck = sound.corrupt(fault, draws=[Draws(seed, number)])
        changed = torch.zeros(span.stop - span.start, dtype=torch.bool)
        for part, before, after in (("k", sound.keys, struck.keys), ("v", sound.values, struck.values)):
            layers = torch.stack([layer[0, :, span] for layer in after]).cpu()
            was = torch.stack([layer[0, :, span] for layer in before]).cpu()
            changed |= (layers != was).any(-1).any(1).any(0)
            vectors[part].append(layers.float().permute(2, 0, 1, 3).flatten(2))
        labels.append(changed.long())
        contexts += [number] * len(changed)
    whole = torch.cat(labels)
    if len(whole.unique()) < 2:
        raise UserError(
            f"The fault struck {'every' if bool(whole[0]) else 'no'} slot of segment {at!r}; give it a scope that strikes some."
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
