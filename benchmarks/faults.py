"""A sweep of faults as rows of one batch, compared with one prompt and one condition at a time, prefilled each time;
and several prompts in one batch, compared with one batch for each.

Both strike the same slots with the same noise, and must first give the same answers, token for token.

    python benchmarks/faults.py --repeats 2
"""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from timing import Row, compared, main
from transformers import DynamicCache

import kvprobe as kv
from kvprobe.faults import Distractor, Draws, Fault, FaultContext, Gaussian, Scope, Zeros
from kvprobe.faults.strike import strike
from kvprobe.inference.forward import new_slots
from kvprobe.inference.sweep import Question, Trial, sweep
from kvprobe.text.tokens import Tokens

NEW_TOKENS = 8
PROMPTS, TOGETHER = 4, 13
"""Prompts that share a batch, and how many conditions each of them has."""
RATES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5)


def conditions(at: int | str, transient: bool, rates: Sequence[float]) -> list[Fault]:
    """Three kinds of fault, K and V together and apart, at every rate."""
    kinds = (Gaussian("channel"), Zeros(), Distractor())
    scopes = [Scope(rate=rate, parts=parts) for rate in rates for parts in ("kv", "k", "v")]
    return [replace(kind, scope=scope, at=at, transient=transient) for kind in kinds for scope in scopes]


def plainly(model: kv.Model, ids: Sequence[int], fault: Fault, context: FaultContext) -> list[int]:
    """One prompt, one condition: read the prompt, damage the cache of transformers, and decode.

    The context is the sweep's: by the moments of another cache, off by rounding, a covariance may have an eigenvector
    of the other sign, and the noise that it shapes is another.
    """
    network = model.lanes.plain
    past = DynamicCache()
    with torch.no_grad():
        network(torch.tensor([ids[:-1]]), past_key_values=past, use_cache=True)
    answer, token = [], ids[-1]
    for step in range(NEW_TOKENS):
        tensors = [{"K": layer.keys.contiguous(), "V": layer.values.contiguous()} for layer in past.layers]
        for layer, parts in zip(past.layers, tensors, strict=True):
            layer.keys, layer.values = parts["K"], parts["V"]
        damage = None
        if fault.due(step):
            ledger = model_cache(past, [*ids[:-1], *([ids[-1], *answer][:step])]).ledger
            damage = strike([fault], [Draws()], [0], tensors, ledger, context, step, remember=fault.transient)
        with torch.no_grad():
            logits = network(torch.tensor([[token]]), past_key_values=past, use_cache=True).logits
        if damage is not None and fault.transient:
            # The cache has grown into new tensors: restore the old slots in these.
            damage.undo()
            for layer, parts in zip(past.layers, tensors, strict=True):
                slots = slice(parts["K"].shape[2])
                layer.keys[:, :, slots], layer.values[:, :, slots] = parts["K"], parts["V"]
        token = int(logits[0, -1].argmax())
        answer.append(token)
    return answer


def model_cache(past: DynamicCache, ids: Sequence[int]) -> kv.KVCache:
    """The cache of transformers with a ledger."""
    ledger = new_slots([Tokens.of(ids)], past.layers[0].keys.device)
    copies = [(layer.keys.clone(), layer.values.clone()) for layer in past.layers]
    return kv.KVCache.of(tuple(keys for keys, _ in copies), tuple(values for _, values in copies), ledger)


def measure(asked: Namespace) -> Iterator[Row]:
    length, rates = (32, RATES[3:4]) if asked.quick else (256, RATES)
    model = kv.load(asked.model)
    draw = torch.Generator().manual_seed(0)
    ids, other = (torch.randint(5, 20_000, (length,), generator=draw).tolist() for _ in range(2))
    donor = model.prefill(Tokens.of(other))
    context = FaultContext(model.prefill(Tokens.of(ids[:-1])), {"distractor": donor})
    for name, at, transient in (("written once", 0, False), ("anew before each token", "every", True)):
        faults = conditions(at, transient, rates)

        def batched(faults: list[Fault] = faults) -> list[list[int]]:
            swept = model.sweep(
                Tokens.of(ids), faults, donors={"distractor": donor}, max_new_tokens=NEW_TOKENS, stop=(), follow=False
            )
            return [list(outcome.tokens) for outcome in swept.outcomes]

        def one_by_one(faults: list[Fault] = faults) -> list[list[int]]:
            return [plainly(model, ids, fault, context) for fault in faults]

        for fault, mine, theirs in zip(faults, batched(), one_by_one(), strict=True):
            assert mine == theirs, f"{fault}: {mine} in the batch, {theirs} alone"
        what = f"{len(faults)} faults {name}, {NEW_TOKENS} tokens"
        yield compared(what, "a prompt and a fault at a time", batched, one_by_one, asked.repeats, most=0.125)
    trials = [Trial(fault) for fault in conditions("every", True, rates)[:TOGETHER]]
    questions = [
        Question(Tokens.of(ids[length // 16 * number :]), trials, donors={"distractor": donor}, sample=number)
        for number in range(PROMPTS)
    ]

    def answered(batches: Sequence[list[Question]]) -> list[list[int]]:
        swept = [sweep(model.lanes, batch, max_new_tokens=2 * NEW_TOKENS, stop=(), follow=False) for batch in batches]
        return [list(outcome.tokens) for batch in swept for one in batch for outcome in one.outcomes]

    together, apart = partial(answered, [questions]), partial(answered, [[question] for question in questions])
    assert together() == apart()
    what = f"{PROMPTS} prompts, {len(trials)} faults each"
    yield compared(what, "a batch for each prompt", together, apart, asked.repeats, most=1)


if __name__ == "__main__":
    main(measure, __doc__, repeats=3, quick=1)
