"""A canary's questions to caches in hand: a prompt as of the property `slot file`, asked for each of its blocks.

The cache of a list of words is put in an engine's place, damaged or not, and the model is asked what follows four words
of each block. It is what a canary does with saved slots, without an engine around it.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.detection.canary.endpoints import TOPS
from kvprobe.detection.canary.floor import distances
from kvprobe.detection.canary.prompts import CUE, Prompts
from kvprobe.detection.canary.properties import NEW
from kvprobe.detection.canary.target import EngineAnswer, Prompt
from kvprobe.inference.model import Model
from kvprobe.text.tokens import Tokens


class _Words:
    """The tokens of a model in process."""

    def __init__(self, model: Model) -> None:
        self._tokenizer = model.tokenizer

    def tokens(self, text: str, first: bool = False) -> Prompt:
        return tuple(self._tokenizer(text, add_special_tokens=first)["input_ids"])


class QuestionedCaches:
    """Holds what a model says from caches of one list of words against what it says from the right one.

    Attributes:
        tokens: the list.
        start: its cache.
        places: of the questions, one in each block.
    """

    def __init__(
        self, model: Model, length: int, block: int, seed: int, words: Sequence[str] = (), cue: int = CUE
    ) -> None:
        listing = Prompts(_Words(model), seed, words, cue).listing(length)
        self.model = model
        self.tokens = Tokens.of([int(token) for token in listing.body[:length]])
        self.start = model.prefill([self.tokens])
        self.places = range(block // 2, length, block)
        asked = [listing.question(place) for place in self.places]
        said = [() for _ in asked]
        for _ in range(NEW):
            given = [question + answer for question, answer in zip(asked, said, strict=True)]
            last = self._logits(self.start, given, 1)[:, 0].argmax(-1).tolist()
            said = [(*answer, token) for answer, token in zip(said, last, strict=True)]
        self._given = [question + answer[:-1] for question, answer in zip(asked, said, strict=True)]
        self._right = [*self._answers(self.start)]

    def gaps(self, cache: KVCache) -> list[float]:
        """The distance of the answer for each place, in nats.

        Raises:
            UserError: a number of the cache is not finite.
        """
        return [max(distances(right, answer)) for right, answer in zip(self._right, self._answers(cache), strict=True)]

    def _answers(self, cache: KVCache) -> Iterator[EngineAnswer]:
        """To all questions; tokens after the first that differs are those of the right answer."""
        for logits in self._logits(cache, self._given, NEW):
            tops = logits.log_softmax(-1).topk(min(TOPS, logits.shape[-1]))
            yield EngineAnswer(
                tuple(tops.indices[:, 0].tolist()),
                [
                    dict(zip(tokens, values, strict=True))
                    for tokens, values in zip(tops.indices.tolist(), tops.values.tolist(), strict=True)
                ],
            )

    def _logits(self, cache: KVCache, given: Sequence[Prompt], last: int) -> Float[Tensor, "questions last vocab"]:
        texts = [Tokens.of([int(token) for token in one], start=len(self.tokens)) for one in given]
        with torch.no_grad():
            return self.model.extend(cache, texts, logits=last)[1].float()
