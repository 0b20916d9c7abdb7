"""Token omission via attention (TOVA): the slots that the last query looked at stay."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from kvprobe.policies.policy import Scene, Scored


@dataclass(frozen=True)
class TOVA(Scored):
    """Keep the `budget` slots of each layer to which the last query paid most attention, averaged over its heads.

    Oren et al. 2024, "Transformers are Multi-State RNNs" (arXiv 2401.06104). All heads of a layer keep the same slots;
    nothing is kept for being recent.
    """

    @property
    def observes(self) -> int:
        return 1

    def scores(self, scene: Scene) -> Float[Tensor, "layers batch kv_heads slots"]:
        assert scene.attention is not None
        last = scene.attention.recent[:, :, :, -1]
        return last.mean(2, keepdim=True).expand_as(last)
