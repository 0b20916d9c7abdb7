"""Token omission via attention (TOVA): the slots to which the last query paid most attention stay."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from kvprobe.policies.policy import Scene
from kvprobe.policies.scored import Scored


@dataclass(frozen=True)
class TOVA(Scored):
    """Keep the `budget` slots of each layer to which the last query paid most attention, averaged over its heads.

    Oren et al. 2024, "Transformers are Multi-State RNNs" (arXiv 2401.06104). All heads of a layer keep the same slots;
    no slot stays because it is recent.
    """

    @property
    def observes(self) -> int:
        return 1

    def scores(self, scene: Scene) -> Float[Tensor, "layers batch kv_heads slots"]:
        assert scene.attention is not None
        last = scene.attention.recent[:, :, :, -1]
        return last.mean(2, keepdim=True).expand_as(last)
