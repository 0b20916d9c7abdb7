"""The question that everyone has first: what does the model say after messages were hidden, and what still shows?"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from kvprobe.attention import attend, dangling
from kvprobe.brief import Brief, Table, brief, frame_table
from kvprobe.cache.cache import KVCache
from kvprobe.errors import UserError
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import divergence, surprise
from kvprobe.inference.readable import require_type
from kvprobe.names import head_name, near_keywords
from kvprobe.text.tokens import token_texts
from kvprobe.text.transcript import Transcript

ARMS = {
    "full": "everything in view",
    "masked": "the messages hidden after all was read; what comes next keeps its place",
    "re-indexed": "the messages evicted after all was read, and the gap closed by rotating keys",
    "restarted": "the visible messages read anew, as if the others had never been said",
    "rendered": "the visible messages written anew by the chat template and read; where it writes something else",
}
"""Ways to hide messages. From masked to re-indexed positions change, from re-indexed to restarted only what the rest
remembers, and from restarted to rendered the text: a template may write a default system prompt again."""


@dataclass(frozen=True, repr=False)
class Reply(Brief):
    """What the model makes of the question with one cache.

    Attributes:
        arm: see `ARMS`.
        text: its own reply, the most probable token at each step.
        logprobs: in nats, of each token of the reply that it gives with everything in view.
        kl: mean over these tokens of how far its next-token distribution is from the one with everything in view, nats.
        slots: tokens that the question can attend to.
        nbytes: of the cache before the question.
    """

    arm: str
    text: str
    logprobs: tuple[float, ...] = field(repr=False)
    kl: float
    slots: int
    nbytes: int

    @property
    def logprob(self) -> float:
        """Mean over tokens."""
        return sum(self.logprobs) / len(self.logprobs)


@dataclass(frozen=True, repr=False)
class Comparison(Brief):
    """Replies to one question, side by side.

    Attributes:
        model: its name.
        chat: the conversation.
        hidden: the segments that were hidden.
        tokens: of the reply with everything in view, as text.
        replies: by arm.
        attention: one row per layer and head: the share of its attention that it spends on the hidden messages
            (`dangling`) while the question and its answer are read with everything in view, and where this goes when
            they are masked; see `kvprobe.attention.dangling`.
        left_out: why an arm is missing; empty if none is.
    """

    model: str
    chat: Transcript = field(repr=False)
    hidden: tuple[str, ...]
    question: str
    tokens: tuple[str, ...] = field(repr=False)
    replies: Mapping[str, Reply]
    attention: pd.DataFrame = field(repr=False)
    left_out: str = ""

    def _facts(self) -> Iterable[str]:
        yield f"{self.model}, hidden: {', '.join(self.hidden)}, asked {brief(self.question)}"
        yield f"{len(self.replies)} replies"

    def _table(self) -> Table:
        return frame_table(self.df())

    def df(self) -> pd.DataFrame:
        """One row per arm."""
        columns = ("arm", "text", "logprob", "kl", "slots", "nbytes")
        return pd.DataFrame([{name: getattr(reply, name) for name in columns} for reply in self.replies.values()])

    @property
    def reach(self) -> str:
        """How much the question needs what was hidden, in a sentence."""
        first = self.attention["dangling_first"]
        share = self.attention["dangling"] - first
        most = self.attention.loc[share.idxmax()]
        sink = f" and {100 * first.mean():.1f} % on slot 0, the sink, which is hidden too" if float(first.max()) else ""
        return (
            f"With everything in view, the question and its answer spend {100 * share.mean():.1f} % of their attention "
            f"on {', '.join(self.hidden)}{sink}; the most is {100 * share.max():.1f} %, in "
            f"{head_name(int(most['layer']), int(most['head']))}."
        )

    def __str__(self) -> str:
        lines = [f"question: {self.question}", f"hidden: {', '.join(self.hidden)}", ""]
        lines += [f"{'':12}{'log-prob.':>10}{'KL':>8}{'slots':>7}{'cache':>10}  reply"]
        lines += [
            f"{reply.arm:12}{reply.logprob:10.3f}{reply.kl:8.3f}{reply.slots:7}{reply.nbytes / 2**20:6.1f} MiB  "
            f"{reply.text}"
            for reply in self.replies.values()
        ]
        lines += ["", *([self.left_out] if self.left_out else []), self.reach]
        lines += ["Log-prob. and KL: nats per token of the reply with everything in view, and from its distributions."]
        return "\n".join(lines)


@near_keywords
def compare(
    model: Model,
    chat: Transcript | Sequence[Mapping[str, str]],
    mask: Sequence[str],
    ask: str,
    *,
    max_new_tokens: int = 64,
) -> Comparison:
    """Ask one question after a conversation with everything in view, and after messages were hidden in several ways.

    Args:
        chat: the conversation; messages have the segments `m0`, `m1`, … unless it names others.
        mask: the segments to hide.
        ask: the user's next message.
        max_new_tokens: the most tokens of a reply.

    Raises:
        UserError: no such segment, none to hide or none that stays, or a model that kvprobe cannot read.
    """
    require_type("The model", model, Model, "what kvprobe.load returns")
    chat = chat if isinstance(chat, Transcript) else Transcript.from_messages(list(chat))
    if isinstance(mask, str) or not mask or set(mask) >= set(chat.segments):
        raise UserError(
            f"mask is {str(mask)[:60]!r}; give a list of segments to hide, of {', '.join(chat.segments[:8])}, so that "
            "at least one stays."
        )
    restart = chat.without(*mask, mode="contiguous")
    full = model.prefill(chat)
    caches, left_out = {"full": full, "masked": full.mask(*mask)}, ""
    if model.lanes.can_reindex:
        caches["re-indexed"] = caches["masked"].evict(*mask).reindex()
    else:
        left_out = f"Keys of {model.name} cannot be rotated to other positions, so there is no re-indexed cache."
    caches["restarted"] = model.prefill(restart)
    try:
        anew = chat.without(*mask, mode="rendered").tokens(model.tokenizer)
    except UserError as error:
        left_out = f"{left_out} There is no rendered cache: {error}".strip()
    else:
        if anew.ids != restart.tokens(model.tokenizer).ids:
            caches["rendered"] = model.prefill(anew)

    rows = KVCache.join(list(caches.values()))
    given = model.generate(rows, ask=ask, max_new_tokens=max_new_tokens)
    expected = given.tokens[0]
    asked = [prompt.answered(expected) for prompt in model.prompts(rows, ask)]
    _, logits = model.extend(rows, asked, logits=len(expected))
    kl, _ = divergence(logits[:1].expand_as(logits), logits)
    replies = {
        arm: Reply(
            arm,
            given.texts[row],
            tuple((-surprise(logits[row], expected)).tolist()),
            float(kl[row].mean()),
            int(cache.ledger.live_somewhere.sum()),
            cache.nbytes,
        )
        for row, (arm, cache) in enumerate(caches.items())
    }
    tokens = token_texts(expected, model.tokenizer)
    return Comparison(
        model.name, chat, tuple(mask), ask, tokens, replies, _attention(model, caches, ask, expected, mask), left_out
    )


def _attention(
    model: Model, caches: Mapping[str, KVCache], ask: str, expected: Sequence[int], mask: Sequence[str]
) -> pd.DataFrame:
    """Of the question and the reply to it, before and after the mask."""
    (prompt,) = model.prompts(caches["full"], ask)
    read = prompt.answered(expected)
    before, after = (attend(model, read, caches[arm], queries=range(len(read))) for arm in ("full", "masked"))
    return dangling(before, after, mask)
