"""Small models that differ in their memory alone: attention, a state, or a state in all layers but the last.

The state is that of the gated delta rule, as Qwen3-Next has it, or of Mamba-2, as Bamba has it. Sizes are such that a
layer of either has about as many parameters as one that attends.
"""

from collections.abc import Mapping
from typing import Any

from transformers import (
    BambaConfig,
    BambaForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from kvprobe.training.schedule import Memory

_ATTENDS, _RECURS = "full_attention", "linear_attention"


def model_of(memory: Memory, inner: int, shape: Mapping[str, Any]) -> PreTrainedModel:
    """A model with such a memory.

    Args:
        inner: width of the MLPs.
        shape: what `words.word_shape` gives.
    """
    layers, width, heads = (shape[name] for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    size = width // heads
    if memory == "mamba":
        state = {"n_heads": heads, "d_head": size, "d_state": width, "n_groups": 1, "expand": 1, "chunk_size": 32}
        attends = {"attn_layer_indices": [layers - 1], "rope_parameters": shape["rope_parameters"]}
        settings = {**shape, **attends, **{f"mamba_{name}": number for name, number in state.items()}}
        return BambaForCausalLM(BambaConfig(intermediate_size=inner, **settings))
    recurs = {"attention": 0, "recurrent": layers, "hybrid": layers - 1}[memory]
    state = {"num_key_heads": heads, "num_value_heads": heads, "key_head_dim": size, "value_head_dim": size}
    settings = {
        **shape,
        **{f"linear_{name}": number for name, number in state.items()},
        "head_dim": size,
        "layer_types": [_RECURS] * recurs + [_ATTENDS] * (layers - recurs),
        "mlp_only_layers": [*range(layers)],
        "router_aux_loss_coef": 0.0,  # of the experts, of which there are none
        "rope_parameters": {**shape["rope_parameters"], "partial_rotary_factor": 1.0},
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(intermediate_size=inner, **settings))
