"""What the slots of a lossy memento hold beyond their text, how many bits a slot holds, and whether a model uses it."""

from dataclasses import dataclass

from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the lossy_memento study.

    Attributes:
        model: a model that `kvprobe train lossy` trained: one that ships, or a folder.
        others: such models of any design, which are read in the same way.
        traces: blocks that are read; probes are trained and tested on them in turn.
        mlp: whether a probe with a hidden layer is trained, too.
        batch: blocks that are read side by side.
        seed: of blocks, stand-ins and probes.
    """

    model: str = "lossy-8-3-retained-0"
    others: tuple[str, ...] | None = (
        "lossy-8-3-recomputed-0",
        "lossy-16-1-retained-0",
        "lossy-16-1-retained-1",
        "lossy-24-1-retained-0",
        "lossy-32-1-retained-0",
    )
    traces: int = ranged(8000, 80, 200_000)
    mlp: bool = True
    batch: int = ranged(500, 1)

    @property
    def beside(self) -> tuple[str, ...]:
        return self.others or ()

    def validate(self) -> None:
        if self.model in (self.others or ()):
            raise UserError(f"Setting 'others' has {self.model!r}, the model itself; name others, or none.")


run = STUDIES["lossy_memento"].run
