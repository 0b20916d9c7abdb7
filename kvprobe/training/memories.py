"""Small models that differ in their memory alone: attention, a state, or a state in all layers but the last.

The state is that of the gated delta rule, as Qwen3-Next has it, or of Mamba-2, as Bamba has it. Sizes are such that a
layer of either has about as many parameters as one that attends.

Time steps start between 0.001 and 0.1, as in the papers (Gu and Dao 2023, "Mamba", section 3.6; Yang et al. 2024).
transformers, which is made for weights that are trained, starts them at 1.3, so that states forget within a few tokens:
four layers with the gated delta rule then learn no digit in 1,200 batches of `kvprobe.training.recall`.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    PreTrainedModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from kvprobe.training.schedule import Memory

SHORTEST, LONGEST = 0.001, 0.1
"""Time steps of a state before training, in tokens."""
_ATTENDS, _RECURS = "full_attention", "linear_attention"


def model_of(memory: Memory, inner: int, shape: Mapping[str, Any]) -> PreTrainedModel:
    """A model with such a memory.

    Args:
        inner: width of the MLPs.
        shape: what `words.word_shape` gives.
    """
    return slow_to_forget(_built(memory, inner, shape))


def slow_to_forget(model: PreTrainedModel) -> PreTrainedModel:
    """The model, whose states now start with time steps as in the papers."""
    for name, parameter in model.named_parameters():
        if name.endswith("dt_bias"):
            steps = torch.empty_like(parameter).uniform_(math.log(SHORTEST), math.log(LONGEST)).exp()
            parameter.data = steps + (-torch.expm1(-steps)).log()  # its softplus is the time step
    return model


def _built(memory: Memory, inner: int, shape: Mapping[str, Any]) -> PreTrainedModel:
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
