"""Tiny random models built in code, one for each kind of attention that kvprobe reads, and a tokenizer for them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvprobe.inference.model import Model, load

VOCABULARY = 64
N_LAYERS = 3
WINDOW = 8
GPT2_POSITIONS = 96

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GQA: dict[str, Any] = _SHAPE | {"num_key_value_heads": 2, "head_dim": 8}


def _kind(config: str, model: str, shape: dict[str, Any], **fields: Any) -> Callable[..., Model]:
    """Builds models of these classes of transformers; `changes` are of the config."""

    def build(seed: int = 0, tokenizer: Any = None, **changes: Any) -> Model:
        made = getattr(transformers, config)(**shape | fields | changes)
        return _model(getattr(transformers, model), made, seed, tokenizer)

    return build


llama = _kind("LlamaConfig", "LlamaForCausalLM", _GQA)
"""Grouped-query attention with rotary positions."""


@cache
def any_model(layers: int = N_LAYERS) -> Model:
    """Where it does not matter which, but perhaps how many layers it has."""
    return llama(tokenizer=tiny_tokenizer(), num_hidden_layers=layers)


qwen3 = _kind("Qwen3Config", "Qwen3ForCausalLM", _GQA)
"""Grouped-query attention with norms on queries and keys."""
gemma3 = _kind(
    "Gemma3TextConfig",
    "Gemma3ForCausalLM",
    _GQA,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    query_pre_attn_scalar=8,
)
"""Two layers with a sliding window, then a full one; norms on queries, keys and around the blocks."""
_NO_INNER = {name: value for name, value in _SHAPE.items() if name != "intermediate_size"}
gpt2 = _kind("GPT2Config", "GPT2LMHeadModel", _NO_INNER, n_inner=48, max_position_embeddings=GPT2_POSITIONS)
"""Multi-head attention with a table of learned positions."""
_QUARTER = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
gpt_neox = _kind("GPTNeoXConfig", "GPTNeoXForCausalLM", _SHAPE, rope_parameters=_QUARTER)
"""Attention and MLP in parallel, a fused QKV projection, and a quarter of each head rotated."""
mixtral = _kind("MixtralConfig", "MixtralForCausalLM", _GQA, num_local_experts=4, num_experts_per_tok=2)
"""A mixture of four experts, two for each token."""
olmoe = _kind("OlmoeConfig", "OlmoeForCausalLM", _GQA, num_experts=8, num_experts_per_tok=2)
"""A mixture of eight experts, two for each token, whose weights need not add up to one."""
_SPARSE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "mlp_only_layers": [0]}
qwen3_moe = _kind("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _GQA, **_SPARSE)
"""A dense layer, then two layers of eight experts, three for each token."""
gpt_oss = _kind(
    "GptOssConfig",
    "GptOssForCausalLM",
    _GQA,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=WINDOW,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
)
"""A mixture of four experts with a bias in the router; attention sinks, every other layer with a window."""


MIXTURES: dict[str, Callable[..., Model]] = {
    "mixtral": mixtral,
    "olmoe": olmoe,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
}
"""Mixtures of experts."""

ARCHITECTURES: dict[str, Callable[..., Model]] = {
    "llama": llama,
    "qwen3": qwen3,
    "gemma3": gemma3,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "mixtral": mixtral,
}

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789ABDEHIMSTUW .,:?-\n"
_MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "a"), ("u", "s"), ("Ġ", "1"), (".", "Ċ"), ("e", "r")]


def tiny_tokenizer(chat_template: str | None = CHATML, **special: str) -> PreTrainedTokenizerFast:
    """A fast byte-level BPE tokenizer whose ids fit the tiny models; it has tokens that cross word borders."""
    letters = [_byte_level(letter) for letter in _ALPHABET]
    entries = ["<|im_start|>", "<|im_end|>", *letters, *("".join(pair) for pair in _MERGES)]
    vocabulary = {entry: index for index, entry in enumerate(entries)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    control = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **control | special)
    tokenizer.chat_template = chat_template
    return tokenizer


def _byte_level(letter: str) -> str:
    return {" ": "Ġ", "\n": "Ċ"}.get(letter, letter)


def _model(kind: Any, config: Any, seed: int, tokenizer: Any) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        plain = kind(config)
        with torch.no_grad():
            # Libraries start norms at one and biases at zero, which would hide a norm or bias left out.
            for parameter in plain.parameters():
                if parameter.dim() == 1:
                    parameter += 0.1 * torch.randn_like(parameter)
    return load(plain, tokenizer=tokenizer)
