"""What unequal budgets have in common: another policy's scores, and its total shared out in another way."""

from dataclasses import dataclass, field, replace

from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import PositionMode
from kvprobe.errors import UserError
from kvprobe.policies.policy import Policy, Provenance, Scene
from kvprobe.policies.scored import Scored
from kvprobe.policies.share import Budget


@dataclass(frozen=True)
class Rebudgeted(Scored):
    """Another policy's scores, total, position mode, provenance and pace."""

    budget: Budget = field(init=False, repr=False)
    policy: Scored
    mode: PositionMode = field(init=False, repr=False, default="gapped")
    provenance: Provenance = field(init=False, repr=False, default="retained")
    every: int | None = field(init=False, repr=False, default=1)

    def __post_init__(self) -> None:
        if isinstance(self.policy, Rebudgeted):
            raise UserError(
                f"{type(self).__name__} would ignore the shares of {self.policy}; give it the policy inside that one."
            )
        # Python callers can give any policy.
        if not isinstance(self.policy, Scored):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError(
                f"{type(self).__name__} shares out the budget of a policy that scores slots, and {self.policy} does "
                "not; give it one such as TOVA(64)."
            )
        for name in ("budget", "mode", "provenance", "every"):
            object.__setattr__(self, name, getattr(self.policy, name))
        super().__post_init__()

    def at(self, prompt: int) -> Policy:
        sized = self.policy.at(prompt)
        return self if sized is self.policy else replace(self, policy=sized)

    @property
    def observes(self) -> int | None:
        return self.policy.observes

    @property
    def draws_by_position(self) -> bool:
        return self.policy.draws_by_position

    @property
    def protected(self) -> int:
        return self.policy.protected

    def scores(self, scene: Scene) -> Float[Tensor, "layers batch kv_heads slots"]:
        return self.policy.scores(scene)
