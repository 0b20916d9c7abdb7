"""The question that everyone has first: what does the model say after messages were hidden, and what still shows?"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pandas as pd

from kvprobe.arguments import AtLeastOne, checked_arguments
from kvprobe.attention import attend, dangling
from kvprobe.brief import Brief, brief, show_page
from kvprobe.cache.cache import KVCache
from kvprobe.checks import names_of
from kvprobe.comparison.reply import Reply, replies_under
from kvprobe.errors import UserError
from kvprobe.exported import Exported
from kvprobe.inference.model import Model
from kvprobe.inference.rows import needs_question, with_question
from kvprobe.names import head_name
from kvprobe.policies.policy import Policy
from kvprobe.policies.written import policies_of
from kvprobe.probing.read_features import When
from kvprobe.text.prefix import CommonPrefix, common_prefix
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript
from kvprobe.text.turns import Turns

ARMS = {
    "full": "everything in view",
    "masked": "the messages hidden in the cache; what comes next keeps its place",
    "re-indexed": "the messages evicted, and the gap closed by rotating keys",
    "restarted": "the visible messages read anew, as if the others had never been said",
    "rendered": "the visible messages written anew by the chat template and read; where it writes something else",
}
"""Ways to hide messages. From masked to re-indexed positions change, from re-indexed to restarted only what the rest
remembers, and from restarted to rendered the text: a template may write a default system prompt again."""


WHEN: Mapping[When, str] = {
    "after": "after all was read",
    "before": "before anything later was read, so that masked differs from restarted in positions alone",
}


@dataclass(frozen=True, repr=False)
class Comparison(Brief, Exported):
    """Replies to one question, side by side.

    Attributes:
        model: its name.
        chat: the conversation.
        hidden: the segments that were hidden.
        tokens: of the reply with everything in view, as text.
        replies: by arm.
        attention: one row per layer and head: the share of its attention that it spends on the hidden messages
            (`dangling`; `dangling_first` is the part of it on slot 0) while the question and its answer are read with
            everything in view, and where this goes when they are masked; see `kvprobe.attention.dangling`. Empty
            where nothing was hidden, or the model's attention cannot be shown.
        left_out: why an arm, or the attention of some layers or all, is missing; empty if none is.
        reused: what an engine that is given the visible messages alone finds of them in the cache with everything;
            None where the template refuses them alone.
    """

    model: str
    chat: Transcript = field(repr=False)
    hidden: tuple[str, ...]
    question: str
    tokens: tuple[str, ...] = field(repr=False)
    replies: Mapping[str, Reply]
    attention: pd.DataFrame = field(repr=False)
    left_out: str = ""
    reused: CommonPrefix | None = None
    when: When = "after"

    def _plain(self) -> Mapping[str, object]:
        chat = [
            {"segment": message.segment, "role": message.role, "text": message.said} for message in self.chat.messages
        ]
        reused = None if self.reused is None else self.reused.tokens
        own = {name: getattr(self, name) for name in ("model", "hidden", "question", "tokens", "attention", "left_out")}
        replies = [{**vars(reply), "logprob": reply.logprob} for reply in self.replies.values()]
        return {**own, "messages": chat, "replies": replies, "reach": self.reach, "reused": reused, "when": self.when}

    def _facts(self) -> Iterable[str]:
        yield f"{self.model}, hidden: {', '.join(self.hidden)}, asked {brief(self.question)}"
        yield f"{len(self.replies)} replies"

    def show(self) -> None:
        """Show the conversation, the replies and where the hidden messages matter on an interactive page.

        In a notebook the page is the output. Elsewhere it is written to a temporary file, and its path is printed.
        """
        show_page("comparison", self)

    def df(self) -> pd.DataFrame:
        """One row per arm."""
        columns = ("arm", "text", "logprob", "kl", "slots", "nbytes")
        return pd.DataFrame([{name: getattr(reply, name) for name in columns} for reply in self.replies.values()])

    @property
    def reach(self) -> str:
        """How much the question needs what was hidden, in a sentence; or how far policies alone take it."""
        if self.attention.empty:
            full, *others = self.replies.values()
            far = max(others, key=lambda reply: reply.kl)
            lost = full.logprob - far.logprob
            most = ", which is furthest from the full cache" if len(others) > 1 else ""
            how = f"{abs(lost):.2f} nats per token {'less' if lost >= 0 else 'more'} likely"
            with_it = f"With the {far.arm} cache" if far.arm in ARMS else f"Under {far.arm}"
            return f"{with_it}{most}, the reply that the model gives with everything in view is {how}."
        first = self.attention["dangling_first"]
        share = self.attention["dangling"] - first
        most = self.attention.loc[share.idxmax()]
        on_sink = 100 * first.to_numpy().mean()
        sink = f" and {on_sink:.1f} % on slot 0, the sink, which is hidden too" if on_sink else ""
        return (
            f"With everything in view, the question and its answer spend {100 * share.mean():.1f} % of their attention "
            f"on {', '.join(self.hidden)}{sink}; the most is {100 * share.max():.1f} %, in "
            f"{head_name(int(most['layer']), int(most['head']))}."
        )

    def __str__(self) -> str:
        width = max(map(len, self.replies)) + 2
        hidden = f"{', '.join(self.hidden)}, {WHEN[self.when]}" if self.hidden else "nothing"
        lines = [f"question: {self.question}", f"hidden: {hidden}", ""]
        lines += [f"{'':{width}}{'log-prob.':>10}{'KL':>8}{'slots':>7}{'cache':>10}  reply"]
        lines += [
            f"{reply.arm:{width}}{reply.logprob:10.3f}{reply.kl:8.3f}{reply.slots:7}{reply.nbytes / 2**20:6.1f} MiB  "
            f"{reply.text}"
            for reply in self.replies.values()
        ]
        lines += ["", *filter(None, (self.left_out, self.reach))]
        if self.reused is not None:
            lines += [
                f"An engine that reads the visible messages again can reuse {self.reused.tokens:,} of the "
                f"{self.reused.lengths[0]:,} tokens in the cache."
            ]
        lines += ["Log-prob. and KL: nats per token of the reply with everything in view, and from its distributions."]
        return "\n".join(lines)


@checked_arguments
def compare(
    model: Model,
    chat: Transcript | Sequence[Mapping[str, str]],
    hide: str | Sequence[str] = (),
    ask: str = "",
    *,
    when: When = "after",
    policies: Sequence[Policy | str] = (),
    max_new_tokens: AtLeastOne = 64,
) -> Comparison:
    """Ask one question after a conversation with everything in view, and after messages were hidden in several ways.

    Args:
        chat: the conversation; messages have the segments `m0`, `m1`, … unless it names others.
        hide: the segments to hide, or the only one; none to compare policies alone.
        ask: the user's next message.
        when: `after` everything was read with them in view, so that later turns remember them (setup A of the
            Goldberg/Papailiopoulos exchange on masking prefixes); or `before` any later turn is read, so that the
            masked arm is the restart at other positions.
        policies: or their texts, such as "SnapKV(50%)"; each acts once, after the conversation was read.
        max_new_tokens: the most tokens of a reply.

    Raises:
        UserError: no such segment, none to hide or none that stays, or a model that kvprobe cannot read.
    """
    chat = chat if isinstance(chat, Transcript) else Transcript.from_messages(list(chat))
    hide = names_of(hide)
    if not ask:
        raise UserError("compare needs ask, the user's next message.")
    among = f"of {', '.join(chat.segments[:8])}"
    if not (hide or policies):
        raise UserError(
            f"compare needs hide (--hide), a list of segments {among}, or policies (--policy); give one of them."
        )
    if set(hide) >= set(chat.segments):
        raise UserError(f"hide (--hide) is {str(hide)[:60]!r}; give segments {among}, so that at least one stays.")
    acting = policies_of(policies)
    tokenizer = Turns.of(model).tokenizer
    read = partial(with_question, text=ask, tokenizer=tokenizer, together=needs_question(chat, tokenizer))
    history, question = read(chat)
    if later := [name for name in hide if name in chat.segments and name not in history.segments]:
        raise UserError(
            f"The chat template writes {later[0]!r} into the user's next message, so the cache does not hold it and it "
            "cannot be hidden there; leave it out of the conversation, or hide another segment."
        )
    full = model.prefill(history)
    hiding, left_out, reused = _hiding(model, chat, full, hide, when, read) if hide else ({}, "", None)
    caches = {"full": full, **hiding, **_under_policies(model, history, full, acting)}

    first, replies = replies_under(model, caches, question, max_new_tokens=max_new_tokens, priced=acting)
    unseen = _why_unseen(model) if hide else ""
    attention = pd.DataFrame()
    if hide and not unseen:
        attention, unseen = _attention(model, caches, question.answered(first.ids), hide)
    left_out = f"{left_out} {unseen}".strip()
    return Comparison(model.name, chat, hide, ask, first.tokens, replies, attention, left_out, reused, when)


def _hiding(
    model: Model,
    chat: Transcript,
    full: KVCache,
    hide: Sequence[str],
    when: When,
    read: Callable[[Transcript], tuple[Tokens, Tokens]],
) -> tuple[dict[str, KVCache], str, CommonPrefix | None]:
    """The caches in which messages are hidden, why one is missing, and `Comparison.reused`.

    Args:
        read: the tokens of a conversation, and those of the question after it.
    """
    masked = full.mask(*hide)  # warns of slot 0
    if when == "before":
        masked = model.prefill(read(chat.without(*hide))[0])
    caches, left_out = {"masked": masked}, ""
    if model.lanes.can_reindex:
        caches["re-indexed"] = masked.evict(slots=~masked.ledger.live_somewhere).reindex()
    else:
        left_out = f"Keys of {model.name} cannot be rotated to other positions, so there is no re-indexed cache."
    restart, _ = read(chat.without(*hide, mode="contiguous"))
    caches["restarted"] = model.prefill(restart)
    visible = chat.without(*hide, mode="rendered")
    try:
        anew, _ = read(visible)
    except UserError as error:
        return caches, f"{left_out} There is no rendered cache: {error}".strip(), None
    if anew.ids != restart.ids:
        caches["rendered"] = model.prefill(anew)
    try:
        return caches, left_out, common_prefix(model.tokenizer, chat, visible)
    except UserError:  # written only with the question after it
        return caches, left_out, None


def _under_policies(model: Model, history: Tokens, full: KVCache, policies: Mapping[str, Policy]) -> dict[str, KVCache]:
    """The caches that policies leave of the conversation, which is watched where one of them needs it."""
    observed = [policy.observes for policy in policies.values() if policy.observes is not None]
    scene = model.watch(history, queries=max(observed)) if observed else full
    return {name: model.apply(policy, scene) for name, policy in policies.items()}


def _why_unseen(model: Model) -> str:
    """Why the model's attention cannot be shown; empty if it can."""
    try:
        _ = model.lanes.attention_proved
    except UserError as error:
        return f"Attention is not shown: {error}"
    return ""


def _attention(
    model: Model, caches: Mapping[str, KVCache], read: Tokens, hide: Sequence[str]
) -> tuple[pd.DataFrame, str]:
    """Of the question and the reply to it, before and after the mask; and the layers that do not attend."""
    before, after = (attend(model, read, caches[arm], queries=range(len(read))) for arm in ("full", "masked"))
    on_first = before.weights[..., 0].mean(-1) * before.cache.ledger.in_segments(hide)[0, 0]
    return dangling(before, after, hide).assign(dangling_first=on_first.flatten().cpu().numpy()), before.unseen
