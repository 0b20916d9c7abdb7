"""Trains the model `ordinal`, whose summaries hold a payload or a pointer by construction.

`python models/train_ordinal.py FOLDER` writes weights, config and tokenizer. Ordinary text does not separate a payload
from a pointer, but this loss does: in part of the examples the summary and the question see different lists
(interchange intervention training, Geiger et al. 2022, arXiv 2112.00826). After `copied` the answer is the thing that
the *summary* saw. After `located` it is the thing at that place in the list that the *question* sees. After `chosen`
both always see the same list, so the model is free to store either.

One pass does this. It has two copies of the list, at the same positions: the question attends to the first, the summary
to the second, and neither copy to the other. With two equal copies, the pass equals an ordinary run.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from kvprobe.tasks.ordinal import PLACES, Memo, Split, draw, vocabulary

CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ ' ' + message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Training:
    """How the model is trained.

    Attributes:
        steps: batches, each seen once.
        batch: memos in a batch.
        learning_rate: the highest; it rises over the first twentieth of the steps and falls to 0 along a cosine.
        layers, width, heads: of the Llama.
        seed: of weights and memos.
    """

    steps: int = 2600
    batch: int = 96
    learning_rate: float = 3e-3
    layers: int = 3
    width: int = 64
    heads: int = 4
    seed: int = 0


@dataclass(frozen=True)
class Example:
    """A training example.

    Attributes:
        seen: the memo as the question sees it.
        summarised: the memo as the summary saw it: the same, or with two things exchanged.
        summary_sees: whether the summary sees its list.
        question_sees: whether the question sees its list.
    """

    seen: Memo
    summarised: Memo
    summary_sees: bool = True
    question_sees: bool = True

    @property
    def answer(self) -> str:
        """The thing that the summary saw for a payload, otherwise the one that the question sees."""
        return (self.summarised if self.seen.reference == "payload" else self.seen).answer


def draw_examples(split: Split, count: int, rng: np.random.Generator) -> list[Example]:
    """Examples of one split. Of those with a forced reference, half have two lists, and a quarter lack one list."""
    return [_example(draw(split, rng), rng) for _ in range(count)]


def _example(memo: Memo, rng: np.random.Generator) -> Example:
    share = rng.random()
    if memo.reference == "free" or share < 0.25:
        return Example(memo, memo)
    if share < 0.5:
        payload = memo.reference == "payload"
        return Example(memo, memo, summary_sees=payload, question_sees=not payload)
    return Example(memo, memo.swapped((memo.place + int(rng.integers(1, len(PLACES)))) % len(PLACES)))


@dataclass(frozen=True)
class Batch:
    """Examples as inputs of the model.

    Attributes:
        ids: start, list of the question, list of the summary, summary, question, answer.
        positions: of the tokens; both lists have the same.
        visible: which slots each token attends to.
    """

    ids: Int[Tensor, "batch tokens"]
    positions: Int[Tensor, "batch tokens"]
    visible: Bool[Tensor, "batch 1 tokens tokens"]

    @classmethod
    def of(cls, examples: Sequence[Example]) -> "Batch":
        number = {word: index for index, word in enumerate(vocabulary())}
        rows = [_pieces(example) for example in examples]
        lengths = [len(piece) for piece in rows[0]]
        ids = torch.tensor([[number[word] for piece in row for word in piece] for row in rows])
        start, block = lengths[:2]
        positions = torch.arange(ids.shape[1])
        positions[start + block :] -= block
        piece = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        causal = torch.ones(len(piece), len(piece), dtype=torch.bool).tril()
        visible = causal.repeat(len(rows), 1, 1)
        questions_list, summarys_list, summary, question = piece == 1, piece == 2, piece == 3, piece > 3
        visible[:, (summarys_list | summary)[:, None] & questions_list] = False
        visible[:, question[:, None] & summarys_list] = False
        for row, example in enumerate(examples):
            if not example.summary_sees:
                visible[row, summary[:, None] & summarys_list] = False
            if not example.question_sees:
                visible[row, question[:, None] & questions_list] = False
        return cls(ids, positions.expand(len(rows), -1), visible[:, None])


def _pieces(example: Example) -> list[list[str]]:
    """The words of an example: start, list of the question, list of the summary, summary, question, answer."""
    start, block, summary, question = (text.split() for text in example.seen.texts())
    summarised_block = example.summarised.texts()[1].split()
    return [["<bos>", *start], block, summarised_block, summary, question, [example.answer, "<eos>"]]


def train(training: Training) -> tuple[LlamaForCausalLM, list[float]]:
    """The trained model and the loss of each step, in nats per token of the answer."""
    with torch.random.fork_rng():
        torch.manual_seed(training.seed)
        model = LlamaForCausalLM(config_of(training))
    optimiser = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate(step, training.steps))
    losses = []
    with tqdm(range(training.steps), desc="Training ordinal", unit="step") as bar:
        for step in bar:
            rng = np.random.default_rng([training.seed, step])
            loss = answer_loss(model, Batch.of(draw_examples("train", training.batch, rng)))
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
    return model.eval(), losses


def answer_loss(model: LlamaForCausalLM, batch: Batch) -> Float[Tensor, ""]:
    """Cross-entropy of the answer and the end after it; the rest of a memo is random or fixed."""
    return torch.nn.functional.cross_entropy(_last_logits(model, batch).flatten(0, 1), batch.ids[:, -2:].flatten())


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, examples: Sequence[Example]) -> float:
    """The share of examples whose answer is the likeliest word."""
    batch = Batch.of(examples)
    return float((_last_logits(model, batch)[:, 0].argmax(-1) == batch.ids[:, -2]).float().mean())


def _last_logits(model: LlamaForCausalLM, batch: Batch) -> Float[Tensor, "batch 2 vocab"]:
    """The logits from which the answer and the end after it are read."""
    output: Any = model(
        input_ids=batch.ids[:, :-1],
        position_ids=batch.positions[:, :-1],
        attention_mask=batch.visible[:, :, :-1, :-1],
        logits_to_keep=2,
        use_cache=False,
    )
    return output.logits


def config_of(training: Training) -> LlamaConfig:
    """A small Llama for `vocabulary()`."""
    words = vocabulary()
    return LlamaConfig(
        vocab_size=len(words),
        hidden_size=training.width,
        intermediate_size=3 * training.width,
        num_hidden_layers=training.layers,
        num_attention_heads=training.heads,
        num_key_value_heads=training.heads // 2,
        max_position_embeddings=256,
        # Memos are short: with the usual 10,000 most frequencies would hardly rotate keys.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        initializer_range=training.width**-0.5 / 2,
        tie_word_embeddings=False,
        bos_token_id=words.index("<bos>"),
        eos_token_id=words.index("<eos>"),
        pad_token_id=None,
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word of `vocabulary()`, with a chat template that only joins the messages."""
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary())}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    built = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
    built.chat_template = CHAT_TEMPLATE
    return built


def _rate(step: int, steps: int) -> float:
    warm = max(1, steps // 20)
    return min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)))


def main() -> None:
    """Train with the settings that the shipped weights were trained with."""
    if len(sys.argv) != 2:
        sys.exit("usage: python models/train_ordinal.py FOLDER")
    folder = Path(sys.argv[1])
    training = Training()
    model, losses = train(training)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    rng = np.random.default_rng([training.seed, training.steps])
    held_out = np.mean([accuracy(model, draw_examples("held_out", 100, rng)) for _ in range(20)])
    print(
        f"Loss of the last 100 steps {np.mean(losses[-100:]):.4f} nats, {held_out:.1%} of held-out answers right; "
        f"{folder}."
    )


if __name__ == "__main__":
    main()
