"""Tokenizers and shapes of small models: one token for each word of a list."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

JOINED = "{{ bos_token }}{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}"
"""A chat template that writes messages one after the other."""


def word_tokenizer(
    words: Sequence[str], chat_template: str = JOINED, *, end: str = "<eos>", special: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """A tokenizer that splits at white space; `<unk>` and `<bos>` are among the words.

    Args:
        words: a word's id is its index.
        end: the word that ends a turn.
        special: other control tokens.
    """
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token=end,
        clean_up_tokenization_spaces=False,
        **({"additional_special_tokens": list(special)} if special else {}),
    )
    built.chat_template = chat_template
    return built


def word_shape(
    words: Sequence[str],
    layers: int,
    width: int,
    heads: int,
    *,
    kv_heads: int | None = None,
    longest: int = 256,
    end: str = "<eos>",
) -> dict[str, Any]:
    """Settings of a small transformer over such words, whatever its blocks are.

    Args:
        kv_heads: as many as heads by default.
        longest: text, in words.
        end: the word that ends a turn.
    """
    return {
        "vocab_size": len(words),
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "max_position_embeddings": longest,
        # Texts are short: with the usual 10,000 most frequencies would hardly rotate keys.
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "initializer_range": width**-0.5 / 2,
        "tie_word_embeddings": False,
        "bos_token_id": words.index("<bos>"),
        "eos_token_id": words.index(end),
        "pad_token_id": None,
    }
