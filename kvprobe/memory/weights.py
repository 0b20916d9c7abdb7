"""How many parameters a model has, from its config alone.

The counts are those of `AutoModelForCausalLM.from_config` in transformers 5.23: without buffers, and without the
modules for multi-token prediction, which it does not build.
"""

from kvprobe.errors import UserError
from kvprobe.memory.blocks import Weights, experts
from kvprobe.memory.config import Config
from kvprobe.memory.defaults import defaults_of
from kvprobe.memory.families import BLOCKS, NEVER_TIED
from kvprobe.memory.heads import width
from kvprobe.names import unknown

__all__ = ["Weights", "active", "weights"]


def weights(config: Config) -> Weights:
    """The parameters of a model.

    Raises:
        UserError: the family is unknown, or a field is missing or invalid.
    """
    if config.kind not in BLOCKS:
        raise UserError(f"In the config of {config.name}: {unknown('model_type', config.kind[:40], BLOCKS)}")
    config = config.with_defaults(defaults_of(config.kind))
    tokens = config.size("vocab_size") * width(config)
    # LFM2 has its own name for this field, which takes precedence if a config has both.
    tied = config.flag("tie_embedding", "tie_word_embeddings", default=False)
    head = 0 if tied and config.kind not in NEVER_TIED else tokens
    return sum((block(config) for block in BLOCKS[config.kind]), Weights(embedding=tokens, head=head))


def active(config: Config) -> int:
    """The parameters that one token uses: all except the matrices of the routed experts that it is not sent to.

    The whole embedding and all biases of the experts are counted.

    Raises:
        UserError: as in `weights`, or a token is sent to more experts than there are.
    """
    counted = weights(config)
    if not counted.experts:
        return counted.total
    among = experts(config)
    chosen = config.size("num_experts_per_tok", "num_experts_per_token", default=2 if config.kind == "jamba" else among)
    if chosen > among:
        raise UserError(
            f"{config.name} sends each token to {chosen} of {among} experts in its config; give at most {among}."
        )
    return counted.total - counted.experts // among * (among - chosen)
