"""In the toy of Memento: how much of what probes read of hidden digits is text, and does the model use the rest?"""

from dataclasses import dataclass

from kvprobe.errors import UserError
from kvprobe.experiments.settings import Settings, ranged
from kvprobe.studies import STUDIES
from kvprobe.training.schedule import Content


@dataclass(frozen=True, kw_only=True)
class Config(Settings):
    """Settings of the memento_toy study.

    Attributes:
        model: a model that `kvprobe train memento` trained: one that ships, or a folder.
        seeds: models of the same training with other seeds, which are read in the same way.
        checkpoints: earlier weights of the model, such as `FOLDER/checkpoints/1000`.
        content: what a memento states.
        keep: blocks before the present one that stay in view.
        blocks: of a trace.
        block: the one whose digits are read.
        traces: that probes are trained and tested on; a quarter is tested.
        changed: traces whose hidden block is exchanged for another.
        closed: traces in which the channel is closed; erasers are fitted on a third of them.
        mlp: whether probes with a hidden layer are trained, too, on the model and its other seeds.
        untrained: whether a model of random weights is read, too.
        batch: traces that are read side by side.
        seed: of traces, probes and random subspaces.
    """

    model: str = "memento-0"
    seeds: tuple[str, ...] | None = None
    checkpoints: tuple[str, ...] | None = None
    content: Content = "sum"
    keep: int = ranged(0, 0)
    blocks: int = ranged(10, 2, 22)
    block: int = ranged(2, 1)
    traces: int = ranged(16_000, 80, 200_000)
    changed: int = ranged(2000, 8, 20_000)
    closed: int = ranged(4000, 16, 40_000)
    mlp: bool = True
    untrained: bool = True
    batch: int = ranged(500, 1)

    def validate(self) -> None:
        if self.hidden_from > self.blocks:
            raise UserError(
                f"Block {self.block} is hidden from block {self.hidden_from} on where {self.keep} stay in view, but a "
                f"trace has {self.blocks}; give more blocks, or an earlier block."
            )

    @property
    def hidden_from(self) -> int:
        """The first memento that is written while the block is hidden."""
        return self.block + self.keep + 1


run = STUDIES["memento_toy"].run
