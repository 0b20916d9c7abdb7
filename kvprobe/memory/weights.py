"""How many parameters a model has, by what file formats do with them.

The counts are those of the causal language model that transformers builds: without buffers, and without the modules for
multi-token prediction, which it does not build.
"""

from dataclasses import astuple, dataclass

from kvprobe.errors import UserError
from kvprobe.memory.config import Config


@dataclass(frozen=True)
class Weights:
    """Numbers of parameters by kind, since file formats store the kinds differently.

    Attributes:
        embedding: of tokens, of learned positions, and of tokens for each layer (Gemma 3n).
        head: the unembedding matrix; 0 if it is the embedding's.
        linear: matrices of attention, dense MLPs, shared experts and recurrent layers, which weight-only quantisation
            (GPTQ, AWQ, fp8) packs.
        experts: matrices of the experts that a router chooses among.
        other: norms, biases (experts' too), convolutions, routers and gates, decay rates, sinks, and the like.
    """

    embedding: int = 0
    head: int = 0
    linear: int = 0
    experts: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return sum(astuple(self))

    def active(self, config: Config) -> int:
        """The parameters that one token uses: all except the matrices of the routed experts that it is not sent to.

        The whole embedding and all biases of the experts are counted.

        Raises:
            UserError: a token is sent to more experts than there are, or the config does not say to how many.
        """
        if not self.experts:
            return self.total
        among = config.size("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        chosen = config.size("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k")
        if chosen > among:
            raise UserError(
                f"{config.name} sends each token to {chosen} of {among} experts in its config; give at most {among}."
            )
        return self.total - self.experts // among * (among - chosen)
