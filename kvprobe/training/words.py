"""Tokenizers of small models: one token for each word of a list."""

from collections.abc import Sequence

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def word_tokenizer(
    words: Sequence[str], chat_template: str, *, end: str, special: Sequence[str] = ()
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
