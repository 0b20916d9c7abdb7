"""One call from a design to a claim: what can be read at a segment after others were hidden, above which floors, and
whether the model uses it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from kvprobe.arguments import AtLeastZero, Within, checked_arguments
from kvprobe.checks import names_of
from kvprobe.errors import warn
from kvprobe.executors import Executor
from kvprobe.inference.elsewhere import each, shares
from kvprobe.inference.model import Model
from kvprobe.models.lens import Family
from kvprobe.probing.claims import FLOOR, Probing
from kvprobe.probing.controls import random_model
from kvprobe.probing.features import Features, Site
from kvprobe.probing.probe_features import probe_features
from kvprobe.probing.read_features import When, labels_of, read_features, refuse_order, restarted
from kvprobe.probing.use import Asking, Said, can_be_asked, members_of, use_table
from kvprobe.tasks.designs import Design
from kvprobe.text.tokens import Tokens
from kvprobe.weights import weight_of

RETAINED = "retained"


@checked_arguments
def probe(
    model: Model,
    design: Design,
    at: str,
    *,
    hide: str | Sequence[str] = (),
    when: When = "before",
    families: Sequence[Family | str] = ("k", "v", "resid_post"),
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    per_head: bool = False,
    folds: Annotated[int, Within(3)] = 5,
    permutations: AtLeastZero = 99,
    untrained: bool = False,
    seed: AtLeastZero = 0,
    executor: Executor | None = None,
) -> Probing:
    """What each layer's K, V and residual stream at segment `at` contain about the design's target, and whether the
    model uses it.

    Each conversation is read up to the end of `at` (or up to the part `answer` in it); the segments in `hide` are
    masked when `at` begins, or after it was read (see `when`). The result is compared with the restart floor (the same
    tokens at the same positions, computed without `hide`), input embeddings alone, and the controls of
    `kvprobe.probing.claims`. Where `at` has a part `answer`, the model is asked for it with everything in view, after
    hiding and after a restart.

    Args:
        hide: the segments to hide, or the only one.
        when: they are hidden `before` `at` is read, so that only segments in between carry what they said; or `after`
            it was read with them in view (setup A of the Goldberg/Papailiopoulos exchange on masking prefixes). Then
            the model is asked once they are hidden, beginning with the last token of `at`.
        families: of `kvprobe.models.lens.Family`; or TransformerLens' names of sites, such as `blocks.3.attn.hook_v`,
            each of which names its layer.
        layers: all by default; p-values and the choice of a site are then over these alone.
        heads: KV heads, with probes for each; by default all of them side by side.
        per_head: probes for each KV head, of all heads.
        permutations: of labels within context; 0 leaves p-values out.
        untrained: also read a model of the same configuration with random weights, as a further floor.
        seed: of folds, control tasks, permutations and random weights.
        executor: where contexts are read side by side, see `kvprobe.executors`; here by default. Numbers are the same
            in float32 on machines of one kind. Probes are fitted here.

    Raises:
        UserError: fewer contexts than folds, an unknown segment, answers that cannot be compared (see
            `kvprobe.probing.use.can_be_asked`), or what `probe_features` refuses.
    """
    hide = names_of(hide)
    rng = np.random.default_rng(seed)
    asks, doubts = can_be_asked(model, design, at), list[str]()
    if hide:
        tokens = refuse_order(model, design.samples[0].transcript, at, hide)
        if when == "before" and follows_directly(tokens, at, hide):
            doubts = [
                f"{at!r} comes right after what is hidden before it is read, so nothing in view has seen that, and "
                "retained equals restart whatever the model is; give when='after', or probe a later segment."
            ]
    reads = {"at": at, "families": families, "layers": layers, "heads": heads, "per_head": per_head}
    asked = (at, hide, when, reads, asks, int(rng.integers(2**31)) if untrained else None)
    if executor is None:
        arms = read_arms(model, design, *asked)
    else:
        some = shares([*members_of(design).values()], executor)
        members = [[number for context in share for number in context] for share in some]
        pieces = [replace(design, samples=tuple(design.samples[number] for number in numbers)) for numbers in members]
        read = each(model, read_arms, pieces, *asked, executor=executor, doing="Reading conversations", unit="share")
        arms = _together(design, members, read)
    features = arms.features.pop(RETAINED)
    if not doubts and hide and identical(features, arms.features[FLOOR]):
        doubts = ["retained and restart are the same bit for bit, so a comparison of the two tells nothing."]
    floors = {"embedding": embeddings(model, features), **arms.features}
    probing = probe_features(features, floors, folds=folds, permutations=permutations, rng=rng)
    probing = replace(probing, warnings=(*doubts, *probing.warnings), measured=not doubts)
    for warning in probing.warnings:
        warn(warning)
    return replace(probing, use=use_table(design, arms.said) if asks else None)


@dataclass(frozen=True)
class ReadArms:
    """What is read of a design, or of some of its contexts.

    Attributes:
        features: by arm.
        said: of each sample and arm, how its answer fares; see `Asking`.
    """

    features: dict[str, Features]
    said: Said


def read_arms(
    model: Model,
    design: Design,
    at: str,
    hide: Sequence[str],
    when: When,
    reads: Mapping[str, Any],
    asks: bool,
    blank: int | None,
) -> ReadArms:
    """The arms of `probe`; contexts are read apart.

    Args:
        reads: arguments of `read_features`.
        asks: whether the model is asked.
        blank: the seed of random weights that are read too.
    """
    asking = Asking(model, design, at, when) if asks else None
    read, features = partial(read_features, **reads), dict[str, Features]()
    if hide:
        floor = restarted(model, design, hide)
        follow = asking and partial(asking.restarted, floor)
        features[FLOOR] = read(model, floor, follow=follow, note="Reading the restart floor")
    before = hide if when == "before" else ()
    features[RETAINED] = read(model, design, hide=before, follow=asking and partial(asking.hidden, hide))
    if blank is not None:
        features["untrained"] = read(random_model(model, blank), design, hide=before, note="Reading an untrained model")
    return ReadArms(features, asking.said if asking else {})


def _together(design: Design, members: Sequence[Sequence[int]], pieces: Sequence[ReadArms]) -> ReadArms:
    """What was read of all contexts, from what was read of some at a time.

    Args:
        members: the numbers of the samples of each piece.
    """
    labels, contexts = labels_of(design)
    features: dict[str, Features] = {}
    for arm in pieces[0].features:
        read = [piece.features[arm] for piece in pieces]
        rows = np.empty(len(design.samples), dtype=np.int64)
        texts: list[tuple[int, ...]] = [()] * len(design.samples)
        count = 0
        for numbers, some in zip(members, read, strict=True):
            rows[list(numbers)] = some.rows + count
            count += max(some.rows, default=-1) + 1
            for number, text in zip(numbers, some.texts or (), strict=True):
                texts[number] = text
        tensors: dict[Family, Tensor] = {
            family: torch.cat([some.tensors[family] for some in read]) for family in read[0].tensors
        }
        features[arm] = Features(tensors, read[0].sites, rows, labels, contexts, design.target, tuple(texts))
    said = {
        (numbers[number], arm): row
        for numbers, piece in zip(members, pieces, strict=True)
        for (number, arm), row in piece.said.items()
    }
    return ReadArms(features, said)


def follows_directly(tokens: Tokens, at: str, hide: Sequence[str]) -> bool:
    """Whether nothing stands between the first hidden token and this segment but what is hidden."""
    start = min(tokens.span(name).start for name in hide)
    return all(name in hide for name in tokens.segments[start : tokens.span(at).start])


def identical(one: Features, other: Features) -> bool:
    """Whether both hold the same numbers for every sample, bit for bit."""
    pairs = [(one.tensors[family][one.rows], other.tensors[family][other.rows]) for family in one.tensors]
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def embeddings(model: Model, features: Features) -> Features:
    """The same samples, read from nothing but the input embeddings of the same tokens: mean and last."""
    assert features.texts is not None
    distinct = {text: row for row, text in enumerate(dict.fromkeys(features.texts))}
    table = weight_of(model.lanes.plain.get_input_embeddings()).float().cpu()
    read = torch.stack([torch.stack([table[list(text)].mean(0), table[text[-1]]]) for text in distinct])
    rows = np.array([distinct[text] for text in features.texts])
    sites = (Site(0, None, "mean"), Site(0, None, "last"))
    return replace(features, tensors={"resid_pre": read}, sites={"resid_pre": sites}, rows=rows)
