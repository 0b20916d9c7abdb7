"""A probe's card in words: the README.md beside its weights. Its text follows from the card's numbers alone."""

import html
from collections.abc import Callable

from kvprobe.environment import short_commit
from kvprobe.models.lens import Family
from kvprobe.probes.card import CARD_SPLITS, Arm, Card, ProbeInput
from kvprobe.stats import Estimate
from kvprobe.wording import percent, plain, points

FAMILIES: dict[Family, str] = {
    "k_pre": "K before rotary embedding",
    "k": "K",
    "v": "V",
    "resid_pre": "the residual stream before the block",
    "resid_mid": "the residual stream between attention and MLP",
    "resid_post": "the residual stream after the block",
    "attn_out": "the attention output",
    "mlp_out": "the MLP output",
}
ARMS: dict[Arm, str] = {
    "retained": "read after the hidden text was masked, over slots that had seen it",
    "direct": "read while the hidden text was in view",
    "hidden": "of the hidden text itself",
}

_ROWS: dict[str, tuple[str, Callable[[Estimate], str]]] = {
    "accuracy": ("accuracy", percent),
    "floor": ("restart floor: accuracy on the same slots computed again without the hidden text", percent),
    "leak": ("leak: accuracy less restart floor", points),
    "text": ("accuracy from the visible text alone", percent),
    "majority": ("accuracy of the commonest label", percent),
    "permuted": (
        "permutation floor: accuracy with labels permuted within conversations",
        lambda value: f"{100 * value.mean:.1f} %",
    ),
    "p": (
        "family-wise p of the usual site, by these permutations and at one fixed penalty",
        lambda value: f"{value.mean:.2g}",
    ),
    "selectivity": ("selectivity: accuracy less that on the hash control task", points),
    "bits": ("bits of information per label", lambda value: plain(value, 3)),
}


def where(site: ProbeInput) -> str:
    """A site in words."""
    heads = (
        ""
        if site.family not in ("k_pre", "k", "v")
        else ", all KV heads"
        if site.head is None
        else f", KV head {site.head}"
    )
    read = "mean over the slots of a segment" if site.read == "mean" else "last slot of a segment"
    less = ", less the same in the restart" if site.less_restart else ""
    return f"{FAMILIES[site.family]} at layer {site.layer}{heads}, {read}{less}"


def card_page(card: Card) -> str:
    """The card as Markdown."""
    training = card.training
    chosen = (
        f"on inner folds among {training.searched}; {100 * training.agreed:.0f} % of the folds chose it"
        if training.searched > 1
        else "beforehand"
    )
    facts = [
        ("target", f"{card.target.name}: {', '.join(card.target.classes)}"),
        *([("places", ", ".join(card.target.places))] if len(card.target.places) > 1 else []),
        ("of the model", f"{card.model}, fingerprint {card.weights}, trained in {card.dtype}"),
        ("where", where(card.site)),
        ("site chosen", chosen),
        (
            "trained on",
            f"{training.samples} conversations of {training.contexts} contexts of the study {training.study}: segment "
            f"{training.segment}, {ARMS[training.arm]}",
        ),
        ("chance", f"{100 * card.chance:.1f} %"),
    ]
    lines = [
        f"# {card.name}",
        "",
        f"A linear probe. It reads {_inert(training.what)}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {_inert(text)} |" for name, text in facts),
        "",
        "## How well",
        "",
        "Means over places, with 95 % intervals over contexts. For each test fold the site was chosen anew on its "
        "inner fold, so that the search does not inflate the numbers.",
        "",
        f"| | {' | '.join(CARD_SPLITS)} |",
        f"|---|{'---|' * len(CARD_SPLITS)}",
        *_rows(card),
        "",
        "`random`: conversations that the probe has seen with other content. `leave-context-out`: conversations that "
        "it has never seen. `paired`: likewise, each feature less its mean over several contents of the same "
        "conversation.",
        "",
        *([_gain(card), ""] if card.training.power is not None else []),
        _use(card),
        "",
        "## What it is for, and what not",
        "",
        *(f"- {_inert(statement)}" for statement in limits(card)),
        "",
        "## Use",
        "",
        "```python",
        f'probe = kv.Probe.load("{card.name}")',
        *_example(card.site),
        "```",
        "",
        "```",
        f"kvprobe scan {_inert(card.model)} --chat FILE.json --hide m2 --probes {card.name}",
        "```",
        "",
        "## Make it again",
        "",
        "```",
        _inert(card.made.command or "not recorded"),
        "```",
        "",
        f"kvprobe {_inert(card.made.kvprobe or 'of unknown version')}, seed {card.made.seed}, commit "
        f"{_inert(short_commit(card.made.commit) or 'unknown')}; then `kvprobe publish RUN`.",
        "",
        f"Licence of the probe: {_inert(card.licence)}. The model that it reads has its own.",
        "",
    ]
    return "\n".join(lines)


def _example(site: ProbeInput) -> list[str]:
    """Lines of Python that read the site of segment m4 of a conversation in which m2 was masked."""
    comment = "  # probability of each class, [rows, places, classes]"
    if site.family in ("k", "v"):
        lines, read = [], 'cache, "m4"'
        fresh = 'model.prefill(chat.without("m2"))'
    else:
        wanted = f'["{site.family}"], layers=[{site.layer}], segments=["m4"]'
        lines, read = [f"captured = model.capture(tokens, {wanted}, past=cache)"], "captured"
        fresh = f'model.capture(chat.without("m2"), {wanted})'
    if not site.less_restart:
        return [*lines, f"probe.read(model, {read}){comment}"]
    return [*lines, f"restart = {fresh}", f"probe.read(model, {read}, restart=restart){comment}"]


def limits(card: Card) -> list[str]:
    """What follows from the numbers of a card, and what does not."""
    accuracy, leak, chance = card.measure("accuracy"), card.measure("leak"), card.chance
    assert accuracy is not None
    statements = []
    if card.reads_unseen:
        statements.append(
            f"In conversations that it has never seen it is right in {percent(accuracy)} of cases, where chance is "
            f"{100 * chance:.1f} %: it may be used to see whether hidden text can still be read from such slots "
            f"({ARMS[card.training.arm]})."
        )
    elif not accuracy.has_interval:
        statements.append(
            f"It was trained on {card.training.contexts} contexts, too few for an interval, so it is unknown whether "
            "it reads conversations that it has never seen."
        )
    elif accuracy.above(chance):
        known = (
            "no restart floor is known"
            if leak is None
            else f"what it reads above the restart floor is {points(leak)}"
            if not leak.above()
            else "labels permuted within conversations are read as well"
        )
        statements.append(
            f"In conversations that it has never seen it is right in {percent(accuracy)} of cases, above chance "
            f"({100 * chance:.1f} %), but {known}: none of its readings there may be called a leak."
        )
    else:
        statements.append(
            f"In conversations that it has never seen it is not significantly better than chance ({percent(accuracy)} "
            f"against {100 * chance:.1f} %): its probabilities there rightly stay near the class frequencies. It shows "
            "the difference between the splits; it is not a detector."
        )
    statements += [
        f"It was trained on segment {card.training.segment} of written conversations of one kind. On other text, "
        "lengths and segments its probabilities need not hold; check the distance of its input from its training "
        "samples.",
        "It reads differences from the restart, which it must be given: its reading of a zero difference is the same "
        "everywhere."
        if card.site.less_restart
        else "Compare its reading with the restart floor of the same conversation, as kvprobe scan does: without a "
        "difference there is no leak.",
        "That it can read something does not mean that the model uses it.",
        f"It reads {card.model} with the fingerprint {card.weights} and refuses others: in another model, after "
        "fine-tuning, or with another config, tokenizer or chat template its numbers mean nothing.",
    ]
    return statements


def _rows(card: Card) -> list[str]:
    rows = []
    for measure, (name, written) in _ROWS.items():
        numbers = [card.measure(measure, split) for split in CARD_SPLITS]
        if any(numbers):
            rows.append(f"| {name} | {' | '.join('' if number is None else written(number) for number in numbers)} |")
    return rows


def _gain(card: Card) -> str:
    training = card.training
    if training.gain is None:
        return (
            "On its training conversations, each held out in turn, no threshold made nine of ten readings right, so "
            "no single reading may be called a leak."
        )
    return (
        "On its training conversations, each held out in turn, nine of ten readings were right where the class is "
        f"more likely than in the restart by {training.gain:.2f} bits or more. This holds for "
        f"{100 * (training.power or 0):.0f} % of all readings. The threshold was chosen on these conversations, so "
        "expect slightly fewer to be right. A smaller gain may not be called a leak."
    )


def _use(card: Card) -> str:
    use = card.measure("use", "")
    if use is None:
        return "Whether the model uses what this probe reads was not measured."
    verdict = "used" if use.above() else "not used" if use.below() else "not detectably used"
    return (
        f"By the model itself it is {verdict}: its preference for the true answer over other answers is {plain(use)} "
        "nats larger with the retained cache than with the restarted one."
    )


def _inert(text: str) -> str:
    """Text that cannot open HTML, a link, or a table cell."""
    return html.escape(text, quote=False).replace("|", "\\|").replace("`", "'").replace("[", "\\[")
