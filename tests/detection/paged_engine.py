"""A small engine: attention over random weights, whose cache is kept in blocks that requests with one beginning share.

`bug` names what is wrong with it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from kvprobe.detection.canary import EngineAnswer
from kvprobe.detection.canary.target import Prompt

BLOCK, WIDTH, VOCABULARY, LAYERS = 16, 24, 512, 2
Slots = list[np.ndarray]
"""K and V of each layer, [slots, channels]."""


@dataclass
class PagedEngine:
    """An engine; each answer has numerical noise of its own, as large as `noise`, relative to the logits."""

    bug: str = ""
    noise: float = 1e-4
    room: int = 24
    name: str = "a paged engine"
    pool: dict[object, Slots] = field(default_factory=dict)
    order: list[object] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        self.embedding = rng.normal(size=(VOCABULARY, WIDTH))
        angles = np.arange(4096)[:, None] / 50 ** (np.arange(WIDTH // 2) / (WIDTH // 2))
        self.places = np.concatenate([np.sin(angles), np.cos(angles)], 1)
        self.weights = rng.normal(size=(LAYERS, 4, WIDTH, WIDTH)) / WIDTH**0.5
        self.rng, self.pieces = np.random.default_rng(1), dict[int, str]()

    def tokens(self, text: str, first: bool = False) -> Prompt:
        found = {crc32(piece.encode()) % VOCABULARY: piece for piece in re.findall(r"\s?\w+|\s", text)}
        self.pieces |= found
        return tuple(found)

    def text(self, prompt: Prompt) -> str:
        return "".join(self.pieces.get(int(token), "?") for token in prompt)

    def ask(self, prompts: Sequence[Prompt], new: int, reuse: bool) -> list[EngineAnswer]:
        return [
            self._answer(prompt, new, reuse, place if len(prompts) > 1 else 0) for place, prompt in enumerate(prompts)
        ]

    def save(self, prompt: Prompt) -> None:
        self.saved = prompt, self._read(prompt, [np.zeros((0, WIDTH))] * 2 * LAYERS)[0]

    def restore(self) -> None:
        prompt, slots = self.saved
        if self.bug == "zeroed layer":
            slots = [*slots[:2], *(np.zeros_like(part) for part in slots[2:])]
        self._keep(prompt, slots)

    def _answer(self, prompt: Prompt, new: int, reuse: bool, beside: int) -> EngineAnswer:
        known = [np.zeros((0, WIDTH))] * 2 * LAYERS
        while reuse and len(known[0]) + BLOCK < len(prompt):
            key = self._key(prompt, len(known[0]) + BLOCK)
            if key not in self.pool:
                break
            known = [np.concatenate(both) for both in zip(known, self.pool[key], strict=True)]
        reused = len(known[0])
        if reused and self.bug == "keys out of step":
            known = [np.roll(part, 1 - place % 2, 0) for place, part in enumerate(known)]
        slots, logits = self._read(prompt, known)
        if beside == 1 and reuse and self.bug == "cross-talk":
            slots = [np.concatenate([np.zeros_like(part[:BLOCK]), part[BLOCK:]]) for part in slots]
            slots, logits = self._read(prompt, [part[:-1] for part in slots])
        said, tops = (), []
        for number in range(new):
            order = np.argsort(-logits)[:20]
            logs = logits[order] - np.log(np.exp(logits).sum())
            tops.append(dict(zip(order.tolist(), logs.tolist(), strict=True)))
            said += (int(order[0]),)
            if number < new - 1:
                if self.bug == "decoding at a boundary" and len(slots[0]) % BLOCK == 0:
                    slots = [np.concatenate([part[:-BLOCK], np.zeros((BLOCK, WIDTH))]) for part in slots]
                slots, logits = self._read(prompt + said, slots)
        if reuse:
            self._keep(prompt, slots)
        return EngineAnswer(said, tops, reused)

    def _key(self, prompt: Prompt, end: int) -> object:
        return (end, prompt[BLOCK:end]) if self.bug == "hash without the beginning" else prompt[:end]

    def _keep(self, prompt: Prompt, slots: Slots) -> None:
        for end in range(BLOCK, len(prompt) + 1, BLOCK):
            block = [part[end - BLOCK : end].copy() for part in slots]
            if self.bug == "stale last slot" and end == len(prompt):
                block = [np.concatenate([part[:-1], part[:1]]) for part in block]
            if (key := self._key(prompt, end)) in self.pool:
                continue
            self.pool[key] = block
            self.order.append(key)
            if len(self.order) > self.room:
                oldest = self.order.pop(0)
                if self.bug == "evicted block returned":
                    self.pool[oldest] = block  # freed and refilled by another request, but still found
                else:
                    del self.pool[oldest]

    def _read(self, prompt: Prompt, known: Slots) -> tuple[Slots, np.ndarray]:
        """K and V of all tokens, and the logits after the last."""
        start, slots = len(known[0]), list[np.ndarray]()
        x = self.embedding[[int(token) for token in prompt[start:]]] + self.places[start : len(prompt)]
        seen = np.arange(len(prompt)) <= np.arange(start, len(prompt))[:, None]
        for layer, (query, key, value, out) in enumerate(self.weights):
            keys = np.concatenate([known[2 * layer], x @ key])
            values = np.concatenate([known[2 * layer + 1], x @ value])
            scores = np.where(seen, x @ query @ keys.T / 2, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            x = x + weights @ values / weights.sum(1, keepdims=True) @ out
            slots += [keys, values]
        logits = x[-1] @ self.embedding.T / 2
        return slots, logits + self.noise * np.abs(logits).mean() * self.rng.normal(size=VOCABULARY)
