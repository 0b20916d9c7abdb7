"""What score-based policies have in common: a budget of slots for each head, spent on the highest scores."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.slots import Evicts
from kvprobe.errors import UserError
from kvprobe.policies.policy import Live, Policy, Scene
from kvprobe.policies.ranking import highest
from kvprobe.policies.share import Budget, PromptShare


@dataclass(frozen=True)
class Scored(Policy):
    """A policy that keeps, in each layer and head, the `budget` slots of highest score."""

    budget: Budget

    in_slots: ClassVar[str] = "budget"

    def at(self, prompt: int) -> Policy:
        if not isinstance(self.budget, PromptShare):
            return self
        budget = self.budget.of(prompt)
        return replace(self, budget=budget, **self.within(budget))

    def within(self, budget: int) -> dict[str, int]:
        """Settings that must fit into a share that became a number, as they are then."""
        return {}

    @property
    def most(self) -> int | None:
        """The budget as a limit of other settings; None where it is a share."""
        return self.budget if isinstance(self.budget, int) else None

    def _refuse_beyond_budget(self, name: str) -> None:
        """Refuse a setting of more slots than the budget has."""
        if self.most is not None and (slots := getattr(self, name)) > self.most:
            raise UserError(
                f"{type(self).__name__} has {name}={slots} and budget={self.most}; give a larger budget, or less of "
                f"`{name}`."
            )

    @property
    def protected(self) -> int:
        """Slots of the budget that stay whatever attention they received: the newest, or the first."""
        return 0

    @property
    def slot_count(self) -> Evicts:
        return Evicts(self.slots, self.every, protected=self.protected)

    @abstractmethod
    def scores(self, scene: Scene) -> Float[Tensor, "layers batch kv_heads slots"]:
        """The score of each slot; infinite where the slot always stays."""

    def keep(self, scene: Scene) -> Live:
        return highest(self.scores(scene), scene.live, self.slots)
