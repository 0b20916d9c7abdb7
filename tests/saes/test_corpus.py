"""Texts of the model's own: each depends on its number and the seed alone, and goes on past the end of a message."""

from kvprobe.inference.model import Model
from kvprobe.saes import self_written
from kvprobe.text.tokens import Tokens


def test_a_text_does_not_depend_on_other_texts(tiny_llama: Model):
    texts = self_written(tiny_llama, range(4), 12, seed=0)
    assert self_written(tiny_llama, [2], 12, seed=0) == [texts[2]]
    assert len({text.ids for text in texts}) == 4
    assert self_written(tiny_llama, [2], 12, seed=1) != [texts[2]]


def test_texts_begin_with_the_header_of_a_users_message_and_are_of_one_length(tiny_llama: Model):
    header = tiny_llama.tokenizer("<|im_start|>user\n")["input_ids"]
    texts: list[Tokens] = self_written(tiny_llama, range(40), 30, seed=0)
    assert {len(text) for text in texts} == {len(header) + 30}
    assert all(list(text.ids[: len(header)]) == header for text in texts)
    # The end of a message, which would end a generation, is written in some of them before the end.
    (end,) = tiny_llama.tokenizer("<|im_end|>")["input_ids"]
    assert any(end in text.ids[:-1] for text in texts)
