"""What the memory report says. Every claim is decided by the numbers; none is written beforehand."""

from collections.abc import Mapping
from typing import Any

from kvprobe.experiments.reproduce import reproduce_section
from kvprobe.inference.model import Model
from kvprobe.memory.budget import Budget
from kvprobe.memory.table import parts, rows
from kvprobe.memory.units import both, short
from kvprobe.report.document import Figure, Report, Section, Table
from kvprobe.studies.memory.config import Config
from kvprobe.wording import estimate_of, plain

QUESTION = (
    "A prompt that fitted yesterday runs out of memory today. Can that be computed beforehand, from the model's config "
    "alone? And what does the cache that fills the memory save?"
)

ALLOWED = 0.05
"""Relative error of a peak that a budget may have and still be called right."""

_NAMES = {
    "weights": "weights",
    "cache": "cache in the end",
    "reading": "beside the weights, while the prompt is read",
    "generating": "beside the weights, at the last generated token",
    "peak": "peak",
}


def narrate(
    metrics: Mapping[str, Any], stack: Budget, peaks: Any, config: Config, model: Model, environment: Mapping[str, Any]
) -> Report:
    """The report of a run."""
    return Report(
        title=f"The memory of {model.name}",
        question=QUESTION,
        answer=" ".join([answer_peak(metrics), answer_growth(metrics), answer_time(metrics)]),
        warnings=warnings(metrics, stack),
        sections=[
            _budget_section(stack, config),
            _peak_section(peaks, metrics),
            _growth_section(metrics, config),
            _time_section(metrics),
            _limits_section(model),
            reproduce_section(
                "memory",
                config,
                environment,
                also=[
                    "Bytes are the same each time; seconds are not, since they depend on what else the machine does.",
                    "Data: samples.parquet (predicted and measured bytes), growth.parquet (the cache, token by token), "
                    "times.parquet and metrics.json beside this page.",
                ],
            ),
        ],
    )


def answer_peak(metrics: Mapping[str, Any]) -> str:
    """Whether the budget was right about the peak."""
    peak, beside = metrics["off"]["peak"], max(
        (metrics["off"][name] for name in ("reading", "generating")), key=lambda each: abs(each["error"])
    )  # fmt: skip
    verdict = "was right" if abs(beside["error"]) <= ALLOWED else "was not right"
    return (
        f"The budget {verdict}: over {metrics['contexts']} contexts its peak was off by at most {_off(peak)}, and by "
        f"at most {_off(beside)} in what stands beside the weights."
    )


def answer_growth(metrics: Mapping[str, Any]) -> str:
    """Whether the cache was predicted to the byte."""
    equal, tokens = metrics["growth_equal"], metrics["growth_tokens"]
    if equal == tokens:
        return f"The cache was predicted to the byte at all {tokens} tokens at which it was looked at."
    return f"The cache was predicted to the byte at {equal} of {tokens} tokens at which it was looked at."


def answer_time(metrics: Mapping[str, Any]) -> str:
    """What the cache saves."""
    longest = max(metrics["faster"], key=int)
    seconds = {name: metrics["seconds"][name][longest] for name in ("cached", "anew")}
    return (
        f"After {int(longest):,} tokens the next one takes {1e3 * seconds['cached']:.0f} ms with the cache and "
        f"{1e3 * seconds['anew']:.0f} ms if all is read anew, {metrics['faster'][longest]:.0f} times as long; the one "
        f"grows as the length to the power {plain(estimate_of(metrics['slope']['cached']))}, the other to the power "
        f"{plain(estimate_of(metrics['slope']['anew']))}."
    )


def warnings(metrics: Mapping[str, Any], stack: Budget) -> list[str]:
    """What a reader must know before the numbers."""
    found = []
    if metrics["difference"] > 1e-2:
        found.append(
            f"With the cache and without it the logits differ by {metrics['difference']:.2g} of their spread: this is "
            "not the same token, and the times cannot be compared."
        )
    if not stack.widths.exact:
        found.append("The activations of this family are an estimate.")
    return found


def _off(worst: Mapping[str, Any]) -> str:
    return f"{100 * abs(worst['error']):.2f} % (at {worst['context']:,} tokens)"


def _budget_section(stack: Budget, config: Config) -> Section:
    return Section(
        title="Where memory goes",
        paragraphs=[
            f"The budget of {stack.config.name} from its config alone: {stack.parameters:,} parameters as "
            f"{stack.request.dtype.name}, and {sum(stack.bytes_per_token):,} bytes of cache for each token that all "
            f"layers keep. With {config.memory} there is room for {_count(stack.largest_context)} tokens read at once, "
            f"or for {_count(stack.largest_new)} generated after a prompt of {stack.request.prompt:,}: reading many "
            "tokens at once needs more beside the cache than reading one."
        ],
        tables=[
            Table(
                columns=["layers", "what each keeps", "bytes per token", "logical", "allocated"],
                rows=[
                    [which, kind, f"{each:,}", short(held), short(made)]
                    for which, kind, each, held, made in rows(stack)
                ],
                caption=f"By layer, at {stack.request.context:,} tokens. Logical is what a later query may read, "
                "allocated what the tensors of transformers hold.",
            ),
            Table(
                columns=["part of the peak", "bytes"],
                rows=[[name, both(size)] for name, size in parts(stack)],
                caption=f"At {stack.request.context:,} tokens. GB is 10⁹ bytes, GiB 2³⁰.",
            ),
        ],
        figures=[
            Figure("stack", "Memory by the length of a prompt that is read in one pass. Dots are measured peaks."),
            Figure("generating", "Memory by generated tokens, after the prompt."),
        ],
    )


def _count(number: int | None) -> str:
    return "any number of" if number is None else f"{number:,}"


def _peak_section(peaks: Any, metrics: Mapping[str, Any]) -> Section:
    table = [
        [
            f"{row['context']:,}",
            _NAMES[row["what"]],
            short(int(row["predicted"])),
            short(int(row["measured"])),
            _signed(row),
        ]
        for row in peaks.to_dict("records")
        if row["what"] != "weights"
    ]
    weights = peaks[peaks["what"] == "weights"].iloc[0]
    return Section(
        title="Predicted and measured",
        paragraphs=[
            "Each context is read in one pass but for its last two tokens. Weights are "
            f"{short(int(weights['predicted']))} predicted and {short(int(weights['measured']))} measured. Every "
            "allocation of torch is counted, its kernels' scratch included; what other libraries take is not."
        ],
        tables=[
            Table(
                columns=["context", "what", "predicted", "measured", "off by"],
                rows=table,
                caption="Bytes, in decimal units.",
            )
        ],
    )


def _signed(row: Mapping[str, Any]) -> str:
    return f"{100 * (row['predicted'] / row['measured'] - 1):+.2f} %"


def _growth_section(metrics: Mapping[str, Any], config: Config) -> Section:
    return Section(
        title="The cache as it grows",
        paragraphs=[
            f"After a prompt of {config.prompt:,} tokens, {config.new} are generated. {answer_growth(metrics)} The "
            "logical view is what a later query may read; vLLM would reserve whole blocks, and for sliding layers the "
            "tokens in flight beside the window."
        ],
        figures=[
            Figure("growth", "Bytes of the cache by generated token: three views, and what transformers really holds.")
        ],
    )


def _time_section(metrics: Mapping[str, Any]) -> Section:
    table = [
        [
            f"{int(length):,}",
            *(f"{1e3 * metrics['seconds'][name][length]:.1f} ms" for name in ("cached", "anew")),
            f"{times:.1f}",
        ]
        for length, times in metrics["faster"].items()
    ]
    return Section(
        title="What the cache saves",
        paragraphs=[
            "The time to the next token, with the cache of all that stands before it, and with all of it read anew. "
            "Without a cache, generating a text costs the sum of the upper curve. The logits are the same both ways, "
            f"but for {metrics['difference']:.1e} of their spread. {answer_time(metrics)}"
        ],
        tables=[
            Table(
                columns=["tokens", "with the cache", "read anew", "times"], rows=table, caption="Medians over repeats."
            )
        ],
        figures=[Figure("times", "Dots are repeats, lines their medians; both axes are logarithmic.")],
    )


def _limits_section(model: Model) -> Section:
    return Section(
        title="What this does not show",
        points=[
            f"Peaks were measured on {model.lanes.device} for transformers with fused attention (sdpa), one "
            "conversation at a time. Other kernels need other scratch.",
            "What the process takes beside torch's tensors (libraries, the allocator's fragments, a GPU's context of "
            "some hundred megabytes) is in no budget here.",
            "vLLM's blocks follow its source; no vLLM was run.",
            "The power of the length is local: at lengths where attention outweighs the rest it goes to two without a "
            "cache and to one with it.",
        ],
    )
