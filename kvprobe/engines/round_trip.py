"""A cache's way out of an engine and back, end to end, beside transformers: saved, read, hidden in part, written,
restored, and gone on from. `kvprobe engines` prints it.
"""

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.engines.formats import VLLM, installed
from kvprobe.engines.llamacpp import from_slot, to_slot
from kvprobe.engines.server import Completion, served
from kvprobe.inference.model import load
from kvprobe.inference.outcomes import relative_entropy
from kvprobe.models.catalogue import gguf_of
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

HIDDEN = "code"
"""The message that is hidden."""
MESSAGES = (
    ("user", HIDDEN, "The gate code is 4821."),
    ("assistant", "thanks", "Thank you, I have noted it."),
    ("user", "question", "What is the gate code?"),
)
ANSWER = 24
"""Tokens of the answers."""


@dataclass(frozen=True)
class RoundTrip:
    """What one engine made of a conversation.

    Attributes:
        engine: as it is installed.
        model: by name.
        tokens: of the conversation.
        restored: largest change of a next log-probability when the cache went out and back unchanged, in nats.
        apart: KL of the next token from that of transformers, which reads the conversation itself, in nats.
        hidden_apart: the same with the message hidden in both.
        moved: KL by which hiding moves the engine's own next token, in nats.
        answer: with the message in view.
        hidden_answer: with it hidden.
    """

    engine: str
    model: str
    tokens: int
    restored: float
    apart: float
    hidden_apart: float
    moved: float
    answer: str
    hidden_answer: str

    def __str__(self) -> str:
        return "\n".join((
            f"{self.engine}, {self.model}: a conversation of {self.tokens} tokens",
            f"  saved, read, written and restored, its next log-probabilities change by {self.restored:.1g} at most",
            f"  with {HIDDEN!r} in view, its next token is {self.apart:.3g} nats (KL) from that of transformers",
            f"  with {HIDDEN!r} hidden in both, {self.hidden_apart:.3g}; hiding moves its own by {self.moved:.3g}",
            f"  in view:  {self.answer}",
            f"  hidden:   {self.hidden_answer}",
        ))  # fmt: skip


def llamacpp_round_trip(name: str) -> RoundTrip:
    """The round trip of a model whose GGUF file comes from the package index, through llama.cpp in this process.

    Raises:
        UserError: xllamacpp is not installed, or there is no such model.
    """
    engine = f"llama.cpp ({installed(('xllamacpp',)) or 'not installed'})"
    with TemporaryDirectory() as folder:
        gguf = gguf_of(name, Path(folder))
        with served(gguf, cache="f32", context=256, flash=False) as server:
            model = load(name, dtype="float32")
            chat = Transcript.from_messages(
                [{"role": role, "content": content} for role, _, content in MESSAGES],
                names=[segment for _, segment, _ in MESSAGES],
            )
            tokens = chat.tokens(model.tokenizer, generation_prompt=True)
            first = server.complete(tokens.ids, reuse=False)
            said = [*tokens.ids, *first.tokens]
            server.save(0, "seen")
            slot = server.path("seen")
            cache = from_slot(slot, model, tokens)
            to_slot(cache, server.path("back"), like=slot, model=model)
            to_slot(cache.mask(HIDDEN), server.path("hidden"), like=slot, model=model)
            stay = next_token(server.go_on("seen", said, n_probs="all"))
            back = next_token(server.go_on("back", said, n_probs="all"))
            hidden = next_token(server.go_on("hidden", said, n_probs="all"))
            answers = [server.go_on(file, said, ANSWER).tokens for file in ("back", "hidden")]
    step = Tokens.of(first.tokens).shifted(tokens.following)
    own = model.prefill(tokens)
    theirs = [model.extend(one, [step])[1][0, -1].double().log_softmax(-1) for one in (own, own.mask(HIDDEN))]
    texts = [" ".join(str(model.tokenizer.decode([*first.tokens, *ids])).split()) for ids in answers]
    return RoundTrip(
        engine,
        name,
        len(tokens),
        float((back - stay).abs().max()),
        float(relative_entropy(theirs[0], stay)),
        float(relative_entropy(theirs[1], hidden)),
        float(relative_entropy(stay, hidden)),
        *texts,
    )


def vllm_here() -> str:
    """Whether vLLM is installed here, and how its way is shown, in a sentence."""
    found = installed(VLLM)
    return (
        f"vLLM ({found or 'not installed here'}): `make engines` of kvprobe's sources takes SmolLM2's caches out of it "
        "and back, in an environment of its own; docs/guides/engines.md has what it printed."
    )


def next_token(completion: Completion) -> Float[Tensor, "vocabulary"]:
    """The log-probabilities of a whole vocabulary."""
    logs = completion.log_probabilities[0]
    return torch.tensor([logs[token] for token in range(len(logs))], dtype=torch.double)
