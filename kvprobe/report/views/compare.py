"""A comparison as a page: the conversation, the replies, and where the hidden messages matter."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvprobe.report.document import HeatMap, SeenPassage, TokenView
from kvprobe.report.views.page import Showable, render

if TYPE_CHECKING:  # other pages need no model
    from kvprobe.comparison import Comparison


@dataclass(frozen=True)
class ComparisonPage(Showable):
    """A comparison on a page of its own."""

    comparison: "Comparison"

    @property
    def html(self) -> str:
        return comparison_page(self.comparison)

    @property
    def height(self) -> int:
        return 80


def comparison(result: "Comparison") -> ComparisonPage:
    """A comparison on a page of its own; `Comparison.show` shows it."""
    return ComparisonPage(result)


def comparison_page(comparison: "Comparison") -> str:
    """The page."""
    from kvprobe.comparison import ARMS

    hidden = ", ".join(comparison.hidden)
    policies = [arm for arm in comparison.replies if arm not in ARMS]
    return render(
        "compare.html.j2",
        [_tokens(comparison), *([] if comparison.attention.empty else [_heads(comparison)])],
        title=f"{comparison.model} {f'without {hidden}' if hidden else 'under cache policies'}",
        question="What does the model answer with everything in view, and with other caches of the same conversation?",
        answer=comparison.reach,
        passages=[
            SeenPassage(message.segment, message.role, message.said, hide, "hidden" if hide else "")
            for message in comparison.chat.messages
            for hide in [message.segment in comparison.hidden]
        ],
        asked=comparison.question,
        replies=list(comparison.replies.values()),
        arms={
            **{arm: meaning for arm, meaning in ARMS.items() if arm in comparison.replies},
            **dict.fromkeys(policies, "the policy has acted once, after all was read"),
        },
        left_out=comparison.left_out,
    )


def _tokens(comparison: "Comparison") -> TokenView:
    """How much more or less likely each token of the reply becomes."""
    full = comparison.replies["full"].logprobs
    others = [reply for arm, reply in comparison.replies.items() if arm != "full"]
    return TokenView(
        caption="The reply with everything in view. Colour: how many nats more (blue) or less (red) likely each token "
        "is with another cache.",
        tokens=comparison.tokens,
        labels=[reply.arm for reply in others],
        values=[[logprob - whole for logprob, whole in zip(reply.logprobs, full, strict=True)] for reply in others],
    )


def _heads(comparison: "Comparison") -> HeatMap:
    attention = comparison.attention.assign(spent=lambda rows: rows["dangling"] - rows["dangling_first"])
    table = attention.pivot(index="layer", columns="head", values="spent")
    return HeatMap(
        caption=f"Share of its attention that each head spends on {', '.join(comparison.hidden)}, slot 0 apart, while "
        "the question and the reply are read with everything in view: which heads lose something.",
        rows=[str(layer) for layer in table.index],
        columns=[str(head) for head in table.columns],
        values=table.to_numpy().round(4).tolist(),
        unit="of the attention",
        row_axis="layer",
        column_axis="head",
    )
