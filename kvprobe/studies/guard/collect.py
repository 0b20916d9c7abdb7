"""Each prompt's cache is sound or damaged; guards evict what they take for damage; the rows are answered in one batch.

A guard is learnt from other items of the task, from small talk, or from both. Beside the guards, exactly the struck
slots are evicted, which no guard can know.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.cache.entries import entries
from kvprobe.errors import UserError
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.experiments.work import kept
from kvprobe.faults import BitFlips, Fault, Scope
from kvprobe.faults.catalogue import CATALOGUE
from kvprobe.faults.precision import Fp8Scale
from kvprobe.inference.generate import generate, stop_tokens
from kvprobe.inference.guarding import learn
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import divergence
from kvprobe.inference.trials import newlines, struck
from kvprobe.names import unknown
from kvprobe.policies.guard import Guard
from kvprobe.policies.policy import Scene
from kvprobe.studies.guard import Config
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.passcode import contexts
from kvprobe.tasks.task import Item, Task, items_digest, prompt
from kvprobe.text.tokens import GENERATED, Tokens
from kvprobe.text.transcript import Transcript

SOUND, BITS, TENFOLD = "sound", "bits", "tenfold"
DAMAGED, KNOWN = "damaged", "known"
TASK, TALK, BOTH = "task", "talk", "both"
GUARDS = (TASK, TALK, BOTH)
"""What a guard was learnt from."""
LARGE = 1e9
"""No number of a sound cache is as large."""


def inputs(config: Config) -> dict[str, str]:
    """A digest of the items.

    Raises:
        UserError: an unknown fault or task, or too few items.
    """
    for name in config.faults:
        if name not in (BITS, *CATALOGUE):
            raise UserError(f"Setting 'faults': {unknown('fault', name, [*CATALOGUE, BITS])}")
    return {"tasks": items_digest([find_task(config.task)], config.samples + config.learnt, config.seed)}


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """A row per prompt, fault, rate and arm: damaged as it is, without the struck slots, or as each guard leaves it.

    Columns: `text` (task or talk), `sample`, `fault`, `rate`, `arm`, `right`, `kl` (to the sound cache, nats per token
    of its answer), `broken` (the logits were NaN), `found` (share of the struck slots that were evicted), `alarms`
    (share of the others that were).
    """
    asked = [(TALK, number) for number in range(len(contexts()) - config.learnt)]
    asked += [(TASK, number) for number in range(config.samples)]
    doing = "Damaging, guarding and answering"
    return Parts(model, config, run).table(measure, asked, "answers", doing=doing, unit="prompt")


def measure(model: Model, config: Config, asked: tuple[str, int]) -> Iterator[dict[str, Any]]:
    """The rows of one text."""
    text, number = asked
    guards = guards_of(model, config)
    if text == TALK:
        sound = model.prefill([small_talk(model)[config.learnt + number]])
        rows = [{"arm": kind} | alarms_of(guards[kind], sound) for kind in GUARDS]
    else:
        rows = answered(model, config, number, guards)
    yield from ({"text": text, "sample": number} | row for row in rows)


@kept
def guards_of(model: Model, config: Config) -> dict[str, Guard]:
    """What each guard learns from texts that are not asked about."""
    items = find_task(config.task).items(config.samples + config.learnt, config.seed)
    of_task = [prompt(item, model.tokenizer) for item in items[config.samples :]]
    of_talk = small_talk(model)[: config.learnt]
    texts = {TASK: of_task, TALK: of_talk, BOTH: of_task + of_talk}
    return {kind: learn(model, [[text] for text in texts[kind]], config.alarms / 100) for kind in GUARDS}


def small_talk(model: Model) -> list[Tokens]:
    """Conversations of two exchanges, each about something else."""
    chats = [
        [{"role": "system", "content": one.system}]
        + [
            {"role": role, "content": said}
            for role, said in (
                ("user", one.chat_user),
                ("assistant", one.chat_assistant),
                ("user", one.ask_summary_1),
                ("assistant", one.summary_1),
            )
        ]
        for one in contexts()
    ]
    names = ["system", "m1", "m2", "m3", "m4"]
    return [Transcript.from_messages(chat, names).tokens(model.tokenizer) for chat in chats]


def fault_of(name: str, rate: float, cache: KVCache) -> Fault:
    """A fault of the config; bits are drawn so that there is one for each slot of the rate, on average."""
    share = rate / 100
    if name == BITS:
        numbers = sum(part.heads * part.numbers for parts in cache.shape for part in parts)
        return BitFlips(dtype="bf16", scope=Scope(rate=share / numbers, unit="number"))
    if name == TENFOLD:
        return Fp8Scale(10.0, scope=Scope(rate=share))
    named = CATALOGUE[name]
    return named.make(scope=Scope(rate=share, parts=named.parts, unit=named.unit("slot")))


def answered(model: Model, config: Config, number: int, guards: Mapping[str, Guard]) -> list[dict[str, Any]]:
    """The rows of one item."""
    task = find_task(config.task)
    item = task.items(config.samples + config.learnt, config.seed)[number]
    tokens = prompt(item, model.tokenizer)
    start = model.prefill([tokens[:-1]])
    cases = [(SOUND, 0.0), *product(config.faults, config.rates), (TENFOLD, max(config.rates))]
    damage = partial(struck, model, start, seed=config.seed, number=number)
    caches = [start, *(damage(fault_of(name, rate, start)) for name, rate in cases[1:])]
    hit = torch.cat([struck_slots(start, cache) for cache in caches])
    damaged = KVCache.join(caches)
    arms = {DAMAGED: damaged, KNOWN: without(damaged, hit)}
    arms |= {kind: guard.act(Scene(damaged)).cache for kind, guard in guards.items()}
    gone = {DAMAGED: torch.zeros_like(hit), KNOWN: hit}
    gone |= {kind: guard.evicted(damaged) for kind, guard in guards.items()}
    joined = KVCache.join(list(arms.values()))
    said = say_apart(model, task, item, joined, tokens[-1:])
    rows: list[dict[str, Any]] = []
    for place, (arm, (row, (fault, rate))) in enumerate(product(arms, enumerate(cases))):
        known = {"fault": fault, "rate": rate, "arm": arm}
        rows.append(known | said[place] | shares(gone[arm][row], hit[row]))
    return rows


def say_apart(model: Model, task: Task, item: Item, cache: KVCache, last: Tokens) -> list[dict[str, float]]:
    """What each row says; rows of numbers so large that their logits may not be finite are read one by one."""
    largest = torch.stack([tensor.abs().flatten(1).amax(1) for tensor in cache.tensors]).amax(0)
    large = entries(~(largest < LARGE), bool)
    calm = [row for row, apart in enumerate(large) if not apart]
    said = dict(zip(calm, say(model, task, item, cache.rows(calm), last), strict=True))
    for row in set(range(cache.batch)).difference(calm):
        try:
            said[row] = say(model, task, item, cache.rows([0, row]), last)[1]
        except UserError:  # its logits are NaN
            said[row] = {"right": 0.0, "kl": np.nan, "broken": 1.0}
    return [said[row] for row in range(cache.batch)]


def say(model: Model, task: Task, item: Item, cache: KVCache, last: Tokens) -> list[dict[str, float]]:
    """Whether each row answers rightly, and its KL from the first row, which is sound, over that row's answer."""
    stop = [*stop_tokens(model.lanes), *(newlines(model.tokenizer) if task.one_line else ())]
    reply = generate(model.lanes, [last] * cache.batch, cache, max_new_tokens=task.max_new_tokens, stop=stop)
    answer = reply.tokens[0]
    given = last + Tokens.of(answer[:-1], GENERATED, last.following)
    logits = model.extend(cache, [given] * cache.batch, logits=len(answer))[1]
    kl = entries(divergence(logits[:1].expand_as(logits), logits)[0].mean(1), float)
    return [
        {"right": float(task.score(text, item)[task.scorers[0]]), "kl": nats, "broken": 0.0}
        for text, nats in zip(reply.texts, kl, strict=True)
    ]


def struck_slots(sound: KVCache, damaged: KVCache) -> Bool[Tensor, "1 slots"]:
    """The slots in which anything differs."""
    pairs = zip(sound.tensors, damaged.tensors, strict=True)
    return torch.stack([(one != other).any(-1).any(1) for one, other in pairs]).any(0)


def without(cache: KVCache, gone: Bool[Tensor, "rows slots"]) -> KVCache:
    """The cache with these slots evicted; zeros are in what pads its rows."""
    hidden = gone[:, None, :, None]
    keys, values = (tuple(tensor.masked_fill(hidden, 0) for tensor in part) for part in (cache.keys, cache.values))
    return cache.with_parts({"K": keys, "V": values}).take(*cache.ledger.order(~gone))


def alarms_of(guard: Guard, sound: KVCache) -> dict[str, Any]:
    """What a guard evicts from a sound cache."""
    nothing = torch.zeros(sound.slots, dtype=torch.bool, device=sound.ledger.tokens.device)
    return {"fault": SOUND, "rate": 0.0} | shares(guard.evicted(sound)[0], nothing)


def shares(gone: Bool[Tensor, "slots"], hit: Bool[Tensor, "slots"]) -> dict[str, float]:
    """The share of the struck slots that are gone, and that of the others."""
    return {"found": _share(gone[hit]), "alarms": _share(gone[~hit])}


def _share(chosen: Bool[Tensor, "slots"]) -> float:
    return float(chosen.float().mean()) if len(chosen) else np.nan
