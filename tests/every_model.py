"""Every causal language model of transformers is compared with one pass from scratch, or refused.

    python -m tests.every_model    writes the table of docs/reference/models.md anew

For each class, kvprobe reads a tiny random model in both lanes: after slots were masked, after they were evicted, after
a gap was closed, beside a longer row, and token by token. The expected numbers are computed without a cache and without
kvprobe, under masks made here; where layers are recurrent, with states computed here token by token.
"""

import inspect
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from kvprobe.inference.forward import extend
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model, load
from kvprobe.models.lanes import Lanes
from kvprobe.models.unproved import Lane
from kvprobe.routing import read
from kvprobe.text.tokens import Tokens
from tests.models.every import NAMES, VOCABULARY, WINDOW, tiny

ALLOWED = 1e-5
LENGTH, CUT = 14, 10
HIDDEN = (6, 7, 8)
"""Near the end, inside the shortest window."""

UNBUILT = {
    "blt": "parts of fixed size (96 M)",
    "cohere_compass_text": "the model does not build from its config",
    "dots3_note": "parts of fixed size (77 M)",
    "dots3_note_text": "parts of fixed size (77 M)",
    "fuyu": "parts of fixed size",
    "gemma3": "a tower for pictures of fixed size; its text model is gemma3_text",
    "gemma3n": "needs a package for pictures; its text model is gemma3n_text",
    "gemma4": "a tower for pictures of fixed size; its text model is gemma4_text",
    "gemma4_assistant": "its own checks refuse small sizes",
    "gemma4_unified_assistant": "its own checks refuse small sizes",
    "got_ocr2": "a tower for pictures of fixed size",
    "moss_transcribe_diarize": "a tower for sound of fixed size",
    "qwen4_exp": "the model does not build from its config",
    "qwen4_exp_text": "the model does not build from its config",
    "zamba": "its own weights cannot be tied at this size",
    "zamba2": "its own checks refuse small sizes",
}
"""Model types that cannot be built tiny from their config's fields alone, and why."""


PLACED = {"beam", "llama4", "llama4_text"}
"""Model types that scale queries by their absolute position, or see chunks of positions, so closing a gap does change
their logits."""


WITH_STATE = {"linear_attention", "conv", "hybrid"}
YEARS = "| first in | read | refused | not built |"
"""Of the table of years."""
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "models.md"
HEAD = "| type | class | read | |"
"""Of the table, below the text of the page."""


@dataclass
class Verdict:
    """The result for one class.

    Attributes:
        refusal: the sentence that refuses it; None if it is read.
        errors: by lane and history, the largest difference to the pass from scratch, relative to the largest logit.
        refusals: sentences that refuse a part: the hooked lane, closing gaps.
    """

    kind: str
    refusal: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        return max(self.errors.values())

    def row(self) -> str:
        """As a row of a Markdown table."""
        if self.refusal is not None:
            return f"| {self.kind} | {NAMES[self.kind]} | refused | {self.refusal.replace('|', '/')} |"
        lanes = "plain" if "hooked" in self.refusals else "both lanes"
        closing = "" if "closing gaps" in self.refusals else ", gaps can be closed"
        routing = "" if "routing" in self.refusals else ", routing"
        return f"| {self.kind} | {NAMES[self.kind]} | {lanes}{closing}{routing} | off by at most {self.worst:.0e} |"


def examine(kind: str) -> Verdict:
    """Read a tiny model of this type in every way, and compare.

    Raises:
        Exception: an error that is not a refusal, which is a defect.
    """
    plain, verdict = tiny(kind), Verdict(kind)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (LENGTH,), generator=generator).tolist()
    try:
        model = load(plain)
        extend(model.lanes, None, [Tokens.of(ids[:2])])
    except ValueError as refusal:
        return Verdict(kind, str(refusal))
    clean, hidden = from_scratch(model, ids, ()), from_scratch(model, ids, HIDDEN)
    if difference(clean[CUT:], hidden[CUT:]) < 1e-4:
        raise AssertionError(f"{kind}: hiding slots hardly changes this model, so the comparison shows nothing")
    likeliest = greedy(model, ids[:CUT], 4)
    for lane in lanes_of(model, verdict):
        for name, (logits, expected) in histories(model.lanes, lane, ids, clean, hidden).items():
            verdict.errors[f"{lane}, {name}"] = difference(logits, expected)
        closed(model, lane, ids, verdict)
        words = generate(model.lanes, [Tokens.of(ids[:CUT])], max_new_tokens=4, stop=(), lane=lane).tokens[0]
        verdict.errors[f"{lane}, greedy"] = float(list(words) != likeliest)
    routed(model, ids, clean, verdict)
    return verdict


def lanes_of(model: Model, verdict: Verdict) -> list[Lane]:
    try:
        _ = model.lanes.hooked
    except ValueError as refusal:
        verdict.refusals["hooked"] = str(refusal)
        return ["plain"]
    return ["plain", "hooked"]


def histories(
    lanes: Lanes, lane: Lane, ids: list[int], clean: Tensor, hidden: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Logits by kvprobe in several histories, and as they should be."""
    tokens = Tokens.of(ids)
    before, whole = extend(lanes, None, [tokens[:CUT]], lane, logits=CUT)
    rest = [tokens[CUT:]]
    chosen = torch.zeros(1, CUT, dtype=torch.bool)
    chosen[0, list(HIDDEN)] = True

    def after(cache: Any) -> Tensor:
        return extend(lanes, cache, rest, lane, logits=LENGTH - CUT)[1][0]

    rows, _ = extend(lanes, None, [tokens[:CUT], Tokens.of(ids[:4])], lane)
    _, ended = extend(lanes, rows, [rest[0], Tokens.of(ids[4:6], "text", 4)], lane, logits=2)
    return {
        "at once": (whole[0], clean[:CUT]),
        "cached": (after(before), clean[CUT:]),
        "masked": (after(before.mask(slots=chosen)), hidden[CUT:]),
        "evicted": (after(before.evict(slots=chosen)), hidden[CUT:]),
        "padded": (ended[1], clean[4:6]),
    }


def closed(model: Model, lane: Lane, ids: list[int], verdict: Verdict) -> None:
    """With the first slots evicted and the gap closed, distances are as before, so logits must be too."""
    tokens = Tokens.of(ids)
    first = torch.arange(CUT)[None] < 3
    gapped = extend(model.lanes, None, [tokens[:CUT]], lane)[0].evict(slots=first)
    try:
        _, logits = extend(model.lanes, gapped.reindex(), [tokens[CUT:].shifted(CUT - 3)], lane, logits=LENGTH - CUT)
    except ValueError as refusal:
        verdict.refusals["closing gaps"] = str(refusal)
        return
    if verdict.kind not in PLACED:
        expected = from_scratch(model, ids, (0, 1, 2))[CUT:]
        verdict.errors[f"{lane}, gap closed"] = difference(logits[0], expected)


def routed(model: Model, ids: list[int], clean: Tensor, verdict: Verdict) -> None:
    """Reading with routing recorded, and again with the experts told to do the same, changes nothing."""
    try:
        free = read(model, Tokens.of(ids), logits=LENGTH)
    except ValueError as refusal:
        verdict.refusals["routing"] = str(refusal)
        return
    held = read(model, Tokens.of(ids), routing=free.routing, logits=LENGTH)
    verdict.errors["routing, recorded"] = difference(free.logits[0], clean)
    verdict.errors["routing, held"] = difference(held.logits[0], clean)


def from_scratch(model: Model, ids: list[int], hidden: tuple[int, ...]) -> Tensor:
    """Logits of one pass without a cache, in which tokens from `CUT` on do not see the `hidden` ones."""
    places = torch.arange(len(ids))
    causal = places[:, None] >= places
    causal &= ~(torch.isin(places, torch.tensor(hidden, dtype=torch.long)) & (places[:, None] >= CUT))
    near = places[:, None] - places < WINDOW
    plain = model.lanes.plain
    config = plain.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    chunks = places // WINDOW
    by_kind = {"full_attention": added(causal), "sliding_attention": added(causal & near), "linear_attention": None}
    by_kind["chunked_attention"] = added(causal & (chunks[:, None] == chunks))
    if kinds & WITH_STATE and hidden:
        return folded(plain, ids, hidden, by_kind if "sliding_attention" in kinds else by_kind["full_attention"])
    single = added(causal & near) if kinds == {"sliding_attention"} or (sliding and not kinds) else added(causal)
    before = plain.config._attn_implementation
    plain.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            if kinds & {"sliding_attention", "chunked_attention"}:
                try:
                    return one_pass(plain, ids, by_kind)
                except (AttributeError, TypeError, ValueError):
                    assert len(kinds) == 1, "no way to give this model two masks"
            return one_pass(plain, ids, single)
    finally:
        plain.set_attn_implementation(before)


def folded(plain: Any, ids: list[int], hidden: tuple[int, ...], mask: Any) -> Tensor:
    """Logits in two passes, between which the states are computed anew, one token after the other, without what the
    hidden tokens wrote."""
    layers = [layer for layer, kind in enumerate(plain.config.get_text_config().layer_types) if kind in WITH_STATE]
    file = sys.modules[type(plain).__module__]
    kernels = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention", "mamba2_chunk_scan")
    kernel = next((kernel for kernel in kernels if hasattr(file, kernel)), None)
    given: dict[str, list[Any]] = {name: [] for name in ("causal_conv1d_fn", kernel) if name}

    def noting(name: str, function: Any) -> Any:
        def noted(*tensors: Tensor, **settings: Any) -> Any:
            given[name].append((tensors, settings))
            return function(*tensors, **settings)

        return noted

    past, places = DynamicCache(config=plain.config), torch.arange(len(ids))[None]
    # A window is masked by hand, so that nothing may leave the cache.
    past.layers = [DynamicLayer() if getattr(layer, "is_sliding", False) else layer for layer in past.layers]
    with torch.no_grad():
        with pytest.MonkeyPatch.context() as patch:
            for name in given:
                patch.setattr(file, name, noting(name, getattr(file, name)))
            first = plain(input_ids=torch.tensor([ids[:CUT]]), past_key_values=past, use_cache=True).logits[0]
        kept = [token for token in range(CUT) if token not in hidden]
        for number, layer in enumerate(layers):
            held: Any = past.layers[layer]
            inputs = given["causal_conv1d_fn"][number][0][0]
            held.conv_states[0] = inputs[..., kept[-held.conv_states[0].shape[2] :]]
            if kernel is not None:
                computed = added_up if kernel == "mamba2_chunk_scan" else moved
                tensors, rule = given[kernel][number]
                held.recurrent_states[0] = computed(tensors, rule, hidden)[None]
        after = tree_map(lambda part: part if part is None else part[:, :, CUT:], mask)
        rest = plain(
            input_ids=torch.tensor([ids[CUT:]]), position_ids=places[:, CUT:], attention_mask=after,
            past_key_values=past, use_cache=True,
        ).logits[0]  # fmt: skip
    return torch.cat([first, rest])


def moved(given: Sequence[Tensor], rule: dict[str, Tensor], hidden: tuple[int, ...]) -> Tensor:
    """The state by the gated delta rule."""
    _, key, value = given
    state = torch.zeros(value.shape[2], key.shape[3], value.shape[3])
    for token in range(CUT):
        at = key[0, token].repeat_interleave(value.shape[2] // key.shape[2], 0)
        at = at / (at.square().sum(1, keepdim=True) + 1e-6).sqrt()
        state = state * rule["g"][0, token].exp().reshape(len(state), -1, 1)
        if token not in hidden:
            error = rule["beta"][0, token, :, None] * (value[0, token] - (state * at[..., None]).sum(1))
            state = state + at[..., None] * error[:, None]
    return state


def added_up(given: Sequence[Tensor], rule: dict[str, Tensor], hidden: tuple[int, ...]) -> Tensor:
    """The state of Mamba-2."""
    x, dt, a, b, _ = given
    dt = torch.nn.functional.softplus(dt + rule["dt_bias"])
    state = torch.zeros(x.shape[2], x.shape[3], b.shape[3])
    for token in range(CUT):
        at = b[0, token].repeat_interleave(x.shape[2] // b.shape[2], 0)
        state = state * (a * dt[0, token]).exp()[:, None, None]
        if token not in hidden:
            state = state + dt[0, token][:, None, None] * x[0, token][..., None] * at[:, None]
    return state


def one_pass(plain: Any, ids: list[int], mask: Any) -> Tensor:
    places = torch.arange(len(ids))[None]
    return plain(input_ids=torch.tensor([ids]), position_ids=places, attention_mask=mask, use_cache=False).logits[0]


def added(seen: Tensor) -> Tensor:
    return torch.zeros(1, 1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)


def greedy(model: Model, ids: list[int], count: int) -> list[int]:
    """The likeliest next tokens, each from a pass over all before it."""
    words = list(ids)
    with torch.no_grad():
        for _ in range(count):
            words.append(
                int(model.lanes.plain(input_ids=torch.tensor([words]), use_cache=False).logits[0, -1].argmax())
            )
    return words[len(ids) :]


def difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


def table() -> Iterator[str]:
    """The table, class by class."""
    yield from (HEAD, "|---|---|---|---|")
    for kind in NAMES:
        if kind in UNBUILT:
            yield f"| {kind} | {NAMES[kind]} | not built | {UNBUILT[kind]} |"
        else:
            print(kind, file=sys.stderr, flush=True)
            yield examine(kind).row()


def year(kind: str) -> str:
    """The year of the copyright in the source of a class, where it has one."""
    file = Path(inspect.getfile(getattr(transformers, NAMES[kind])))
    sources = [path for path in (file, file.with_name(file.name.replace("modeling", "modular"))) if path.exists()]
    years = (re.search(r"Copyright (\d{4})", path.read_text(encoding="utf-8")[:1500]) for path in sources)
    found = next((int(year[1]) for year in years if year is not None), 0)
    return str(found) if found > 2023 else "2023 or before, or unknown"


def by_year(table: str) -> list[str]:
    """How many classes of each year the table lists as read, refused and not built."""
    counts: dict[str, Counter[str]] = {}
    listed = re.findall(r"^\| (\S+) \| \S+ \| ([a-z]+)", table, re.MULTILINE)
    for kind, verdict in (row for row in listed if row[0] in NAMES):
        known = verdict if verdict in ("refused", "not") else "read"
        counts.setdefault(year(kind), Counter())[known] += 1
    rows = (f"| {of} | {some['read']} | {some['refused']} | {some['not']} |" for of, some in sorted(counts.items()))
    return [YEARS, "|---|---|---|---|", *rows]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    text, _, _ = PAGE.read_text(encoding="utf-8").partition(HEAD)
    rows = "\n".join(table())
    text = text.partition(YEARS)[0] + "\n".join(by_year(rows)) + "\n\n"
    PAGE.write_text(text + rows + "\n", encoding="utf-8")
