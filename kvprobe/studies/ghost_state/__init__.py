"""What a model with recurrent layers still knows of a turn after its slots were hidden from attention."""

from dataclasses import dataclass

from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the ghost_state study.

    Attributes:
        model: one that `kvprobe train recall` trained, or a model of language.
        others: models of the same kind, which are asked in the same way.
        toys: models that `kvprobe train memento --memory …` trained, for turns and for mistakes; None for none.
        texts: of each design, and of each toy.
        pairs: digits that are hidden.
        distance: unrelated words between them and the question.
        distances: … over which it is measured how long they are kept.
        capacities: numbers of pairs for which it is measured how much is held.
        untrained: whether states of a model with random weights are read, too.
        mlp: whether a probe with a hidden layer is trained, too.
        batch: texts that are read side by side.
        seed: of texts and probes.
    """

    model: str = "recall-hybrid-0"
    others: tuple[str, ...] | None = (
        "recall-hybrid-1",
        "recall-mamba-0",
        "recall-mamba-1",
        "recall-recurrent-0",
        "recall-recurrent-1",
        "recall-attention-0",
        "recall-attention-1",
    )
    toys: tuple[str, ...] | None = None
    texts: int = ranged(2000, 80, 100_000)
    pairs: int = ranged(8, 1, 16)
    distance: int = ranged(8, 8, 4096)
    distances: tuple[int, ...] = (8, 16, 64, 192)
    capacities: tuple[int, ...] = (2, 4, 8, 16)
    untrained: bool = True
    mlp: bool = True
    batch: int = ranged(500, 1)

    @property
    def beside(self) -> tuple[str, ...]:
        return (*(self.others or ()), *(self.toys or ()))

    def validate(self) -> None:
        if self.model in (self.others or ()):
            raise UserError(f"Setting 'others' has {self.model!r}, the model itself; name others, or none.")
        if wrong := [words for words in self.distances if words < 1]:
            raise UserError(f"Setting 'distances' has {wrong[0]}; there is at least one word of talk.")
        if wrong := [pairs for pairs in self.capacities if not 1 <= pairs <= 16]:
            raise UserError(f"Setting 'capacities' has {wrong[0]}; a text has 1 to 16 pairs.")


run = STUDIES["ghost_state"].run
