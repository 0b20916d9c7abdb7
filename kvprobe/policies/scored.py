"""What score-based policies have in common: a budget of slots for each head, spent on the highest scores."""

from abc import abstractmethod
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.slots import Evicts
from kvprobe.policies.policy import Live, Policy, Scene
from kvprobe.policies.ranking import highest


@dataclass(frozen=True)
class Scored(Policy):
    """A policy that keeps, in each layer and head, the `budget` slots of highest score."""

    budget: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("budget", 1)

    @property
    def protected(self) -> int:
        """Slots of the budget that stay whatever attention they received: the newest, or the first."""
        return 0

    @property
    def slot_count(self) -> Evicts:
        return Evicts(self.budget, self.every, protected=self.protected)

    @abstractmethod
    def scores(self, scene: Scene) -> Float[Tensor, "layers batch kv_heads slots"]:
        """The score of each slot; infinite where the slot always stays."""

    def keep(self, scene: Scene) -> Live:
        return highest(self.scores(scene), scene.live, self.budget)
