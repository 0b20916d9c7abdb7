"""Controls: what a probe would score if it read nothing about its target.

- `hash_control`: labels that can only be memorised.
- `permuted_within`: labels shuffled inside each context, so that a probe can use the context alone.
- `lookup`: not a probe, but a table from a context or a text to its most common label.
- `random_model`: the same architecture with random weights.
"""

import copy
import hashlib
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from kvprobe.errors import UserError
from kvprobe.inference.model import Model, load


def hash_control(
    labels: Int[Tensor, "targets samples"], contexts: Sequence[Hashable], classes: int, seed: int
) -> Int[Tensor, "targets samples"]:
    """Labels of the control task: each (context, label) has a random one, drawn by a hash (Hewitt and Liang 2019).

    They depend on the same things as the real labels, and are as frequent as these, but follow no rule: under the
    random split a probe can only memorise them, and under leave-context-out nothing predicts them. Without equal
    frequencies a probe that knows nothing but the commonest label would look selective.

    Raises:
        UserError: the contexts and the labels differ in number.
    """
    if len(contexts) != labels.shape[1]:
        raise UserError(f"Each sample needs one context; got {len(contexts)} contexts for {labels.shape[1]} samples.")
    drawn = []
    for target, row in enumerate(labels.tolist()):
        pairs = [f"{seed}\0{target}\0{context}\0{label}" for context, label in zip(contexts, row, strict=True)]
        sizes, ends = Counter(pairs), np.bincount(row, minlength=classes).cumsum()
        # In a random order, pairs fill up the classes; a pair's is where the middle of its samples comes to lie.
        order = sorted(sizes, key=lambda pair: hashlib.blake2b(pair.encode(), digest_size=8).digest())
        middles = np.cumsum([sizes[pair] for pair in order]) - np.array([sizes[pair] for pair in order]) / 2
        given = dict(zip(order, np.searchsorted(ends, middles, side="right").tolist(), strict=True))
        drawn.append([given[pair] for pair in pairs])
    return torch.tensor(drawn, device=labels.device)


def permuted_within(
    contexts: Int[np.ndarray, "samples"], count: int, rng: np.random.Generator
) -> Int[np.ndarray, "count samples"]:
    """`count` permutations of the samples, each of which moves them only inside their own context."""
    home = np.argsort(contexts, kind="stable")
    keys = np.broadcast_to(contexts, (count, len(contexts)))
    moved = np.empty((count, len(contexts)), dtype=np.int64)
    moved[:, home] = np.lexsort((rng.random((count, len(contexts))), keys))
    return moved


def lookup(
    keys: Sequence[Hashable],
    labels: Int[Tensor, "targets samples"],
    folds: Int[np.ndarray, "samples"],
    classes: int,
) -> Int[Tensor, "targets samples"]:
    """Out-of-fold guesses of a table: the most common training label of the sample's key, or of all samples if the key
    is new.

    With contexts as keys this is what the context alone gives away; with the tokens that a probe reads, what the text
    alone gives away.
    """
    place, numbers = torch.from_numpy(_numbered(keys)), torch.from_numpy(folds)
    width = int(place.max()) + 1
    guesses = torch.empty_like(labels)
    for target, row in enumerate(labels):
        cells = place * classes + row.cpu()
        for fold in range(int(folds.max()) + 1):
            counted = torch.bincount(cells[numbers != fold], minlength=width * classes).view(-1, classes)
            overall = counted.sum(0)
            table = torch.where(counted.sum(1) > 0, counted.argmax(1), overall.argmax())
            test = numbers == fold
            guesses[target, test] = table[place[test]].to(labels.device)
    return guesses


def random_model(model: Model, seed: int) -> Model:
    """A model of the same configuration and tokenizer with random weights: what the architecture alone gives."""
    from transformers import AutoModelForCausalLM

    plain = model.lanes.plain
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = copy.deepcopy(plain.config)
        vars(config).pop("quantization_config", None)
        drawn = AutoModelForCausalLM.from_config(config, dtype=model.lanes.dtype)
    return load(drawn.to(model.lanes.device), tokenizer=model.tokenizer)


def _numbered(keys: Sequence[Hashable]) -> Int[np.ndarray, "samples"]:
    """Equal keys have equal numbers."""
    names = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([names[key] for key in keys])
