"""Reading one conversation under every arm.

It is read once up to the code; the codes are rows of one batch from there to the end of the second summary. There every
arm acts on what was read. What follows is the same text under all arms, at the positions that each calls for. Arms that
no code can reach are read once.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.forced import forced_logits
from kvprobe.inference.forward import onwards
from kvprobe.inference.generate import generate
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import divergence, use_measurements
from kvprobe.models.lens import Family
from kvprobe.probing.features import read_outs
from kvprobe.studies.compaction import Config
from kvprobe.studies.compaction.arms import ARMS, HIDDEN_SEGMENTS, MASK, RECOMPUTED, RESTART, Arm
from kvprobe.tasks.compaction import KINDS, Compaction, asked, compacted_conversation
from kvprobe.tasks.passcode import Context
from kvprobe.text.tokens import Tokens
from kvprobe.text.transcript import Transcript

FAMILIES: tuple[Family, ...] = ("k", "v")
CALIBRATION = ("irrelevant, full", "irrelevant, masked", "irrelevant, restarted")
"""Arms over a hidden block of equal length that has nothing to do with the conversation."""
LOOKED_AT = ("first slot", "rest of the system turn", "hidden turns", "summaries", "T3 itself")
"""Where T3's attention may go; the first slot is where heads send what they have no use for."""
ASKED = ("full", *(arm.name for arm in ARMS))
"""Conditions under which the code is asked for."""
CONDITIONS = (*ASKED, *CALIBRATION)
PAIRS = ((MASK.name, RESTART.name), CALIBRATION[1:])
"""Masked and restarted, of the conversation and of the calibration."""
SEEN = ("full", *PAIRS[0])
"""Conditions under which attention is watched."""


def read_context(
    model: Model,
    context: Context,
    compaction: Compaction,
    filler: Sequence[Context],
    codes: Sequence[str],
    config: Config,
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Everything that is measured on one context.

    Returns:
        Tensors: `arm.family` of shape `[rows, layers, reads, dim]` of T3 under each arm, one row per code or one in all
        for the recomputed arms; `logprob`, `margin` and `correct` `[codes, 1 + arms, code_tokens]` (the full context,
        then the arms); `kl` and `agree` `[conditions, continuation]`, NaN after the reply's end; `between`
        `[conditions, continuation]`, KL from the restarted to the masked arm, of the conversation and of the
        calibration, NaN elsewhere; `same` and `prefix` `[conditions, kinds]` (the answer is that of the full context,
        and the share of its tokens before the first that differs) and `right` (it holds the words of a right answer);
        and `attention` `[seen, layers, heads, looked_at]`, how T3's queries share out theirs. And the answers, as text.
    """
    whole = [compacted_conversation(context, compaction, code).tokens(model.tokenizer) for code in codes]
    third = whole[0].span("T3").start
    tensors, cache = _leak_and_use(model, whole, third, config.batch)
    rows = _conditions(model, cache, whole[0][:third], filler)
    chat = compacted_conversation(context, compaction, codes[0])
    tensors |= _continuation(model, rows, whole[0][third : whole[0].part("reply").start], config.continuation)
    seen = rows.rows([CONDITIONS.index(name) for name in SEEN])
    tensors["attention"] = _attention(model, seen, whole[0][third : whole[0].span("ask").start])
    answers, texts = _answers(model, rows, chat, compaction, config.answer)
    return {name: tensor.contiguous().cpu() for name, tensor in (tensors | answers).items()}, texts


def _leak_and_use(model: Model, whole: Sequence[Tokens], third: int, batch: int) -> tuple[dict[str, Tensor], KVCache]:
    """What T3's slots hold of the code under each arm, and what the model answers about it; and the cache of the first
    code's conversation up to T3."""
    start, ask, answer = whole[0].part("code").start, whole[0].span("ask").start, whole[0].part("answer")
    prefix = model.prefill(whole[0][:start])
    first, _ = model.extend(prefix, [whole[0][start:third]])
    features: dict[str, Tensor] = {}
    restarted: dict[Arm, tuple[KVCache, Tensor]] = {}
    for arm in RECOMPUTED:
        cache = model.apply(arm.policy, first)
        read = model.capture(
            onwards(cache, [whole[0][third : answer.start]]),
            FAMILIES,
            slots=range(ask - third),
            past=cache,
            keep_cache=True,
        )
        assert read.cache is not None
        restarted[arm] = read.cache, read.logits
        features |= {f"{arm.name}.{family}": read_outs(read.stack(family)) for family in FAMILIES}

    every_code = torch.tensor([row.ids[answer] for row in whole], device=model.lanes.device)
    pieces: list[dict[str, Tensor]] = []
    for begin in range(0, len(whole), batch):
        rows = whole[begin : begin + batch]
        cache, _ = model.extend(prefix, [row[start:third] for row in rows])
        # The last code token is never fed: its probability is read off the token before it.
        asking = [row[third : answer.stop - 1] for row in rows]
        code_tokens = answer.stop - answer.start
        piece: dict[str, Tensor] = {}
        said = [model.extend(cache, asking, logits=code_tokens)[1]]
        for arm in ARMS:
            if arm in restarted:
                shared, logits = restarted[arm][0].fork(len(rows)), restarted[arm][1]
                said.append(forced_logits(model, shared, logits, onwards(shared, [row[answer] for row in rows])))
                continue
            acted = model.apply(arm.policy, cache)
            read = model.capture(
                onwards(acted, asking), FAMILIES, slots=range(ask - third), past=acted, logits=code_tokens
            )
            said.append(read.logits)
            piece |= {f"{arm.name}.{family}": read_outs(read.stack(family)) for family in FAMILIES}
        used = use_measurements(said, every_code, list(range(begin, begin + len(rows))))
        pieces.append(piece | {name: used[name] for name in ("logprob", "margin", "correct")})
    joined = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
    return features | joined, first


def _conditions(model: Model, cache: KVCache, tokens: Tokens, filler: Sequence[Context]) -> KVCache:
    """The caches of all `CONDITIONS` after compaction, as rows of one batch."""
    unrelated = model.prefill(irrelevant(model, tokens, filler))
    return KVCache.join(
        [
            cache,
            *(model.apply(arm.policy, cache) for arm in ARMS),
            unrelated,
            *(model.apply(arm.policy, unrelated) for arm in (MASK, RESTART)),
        ]
    )


def irrelevant(model: Model, tokens: Tokens, filler: Sequence[Context]) -> Tokens:
    """The same conversation whose hidden turns speak of other things: their text is that of other contexts, cut to the
    same number of tokens, so that every position and delimiter stays."""
    text = " ".join(f"{other.chat_user} {other.chat_assistant}" for other in filler)
    supply = iter(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    hidden = [
        segment in HIDDEN_SEGMENTS and not delimiter
        for segment, delimiter in zip(tokens.segments, tokens.delimiters, strict=True)
    ]
    return replace(
        tokens, ids=tuple(next(supply) if other else token for token, other in zip(tokens.ids, hidden, strict=True))
    )


def _continuation(model: Model, rows: KVCache, turn: Tokens, length: int) -> dict[str, Tensor]:
    """KL and agreement, token by token, on the reply that the full context gives to `turn`; the calibration arms on
    that of their own full context."""
    kl, agree, between = (torch.full((len(CONDITIONS), length), torch.nan) for _ in range(3))
    split = CONDITIONS.index(CALIBRATION[0])
    for group, (masked, restarted) in zip((range(split), range(split, len(CONDITIONS))), PAIRS, strict=True):
        caches = rows.rows(list(group))
        reference = caches.rows([0])
        reply = generate(model.lanes, onwards(reference, [turn]), reference, max_new_tokens=length).tokens[0]
        forced = turn + Tokens.of(reply[:-1], "reply", turn.following)
        _, logits = model.extend(caches, onwards(caches, [forced]), logits=len(reply))
        distance, same = divergence(logits[:1].expand_as(logits), logits)
        kl[group.start : group.stop, : len(reply)] = distance.cpu()
        agree[group.start : group.stop, : len(reply)] = same.float().cpu()
        one, other = (logits[CONDITIONS.index(name) - group.start] for name in (restarted, masked))
        between[CONDITIONS.index(masked), : len(reply)] = divergence(one, other)[0].cpu()
    return {"kl": kl, "agree": agree, "between": between}


def _attention(model: Model, rows: KVCache, turn: Tokens) -> Float[Tensor, "rows layers heads looked_at"]:
    """How the queries of `turn` share out their attention, on average, under each of these caches."""
    cache, past = rows.ledger, rows.slots
    first = torch.arange(past, device=model.lanes.device) == 0
    system, hidden = cache.in_segments(["system"]), cache.in_segments(HIDDEN_SEGMENTS)
    summaries = cache.in_segments([name for name in cache.names if name.startswith("summary")])
    masks = torch.stack([first.expand_as(system), system & ~first, hidden, summaries])
    shares: dict[int, Tensor] = {}

    def observe(layer: int, pattern: Tensor) -> None:
        before, itself = pattern[..., :past].mean(2), pattern[..., past:].sum(-1).mean(2)
        shared = torch.einsum("bhs,gbs->bhg", before.float(), masks.float())
        shares[layer] = torch.cat([shared, itself[..., None].float()], -1)

    with model.lanes.hooked.observing_patterns(observe):
        model.extend(rows, onwards(rows, [turn]), lane="hooked")
    return torch.stack([shares[layer] for layer in range(model.geometry.n_layers)], 1)


def _answers(
    model: Model, rows: KVCache, chat: Transcript, compaction: Compaction, length: int
) -> tuple[dict[str, Tensor], dict[str, list[str]]]:
    """Greedy answers to the three questions, asked after T3, under every condition."""
    asking = [asked(chat, compaction.question(kind)).tokens(model.tokenizer, generation_prompt=True) for kind in KINDS]
    third, ask = asking[0].span("T3").start, asking[0].span("ask").start
    after, _ = model.extend(rows, onwards(rows, [asking[0][third:ask]]))
    forked = after.fork(len(KINDS))
    prompts = onwards(forked, [question[ask:] for _ in CONDITIONS for question in asking])
    done = generate(model.lanes, prompts, forked, max_new_tokens=length)
    same, prefix, right = (torch.full((len(CONDITIONS), len(KINDS)), torch.nan) for _ in range(3))
    texts: dict[str, list[str]] = {}
    reference = 0
    for place, condition in enumerate(CONDITIONS):
        reference = place if condition in ("full", CALIBRATION[0]) else reference
        texts[condition] = []
        for number, kind in enumerate(KINDS):
            answer, other = (done.tokens[row * len(KINDS) + number] for row in (place, reference))
            text = done.texts[place * len(KINDS) + number]
            texts[condition].append(text)
            same[place, number] = answer == other
            prefix[place, number] = _common(answer, other) / len(other)
            words = compaction.answer(kind)
            if words is not None:
                right[place, number] = words.lower() in text.lower()
    return {"same": same, "prefix": prefix, "right": right}, texts


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers share from the start."""
    equal = [a == b for a, b in zip(one, other, strict=False)]
    return equal.index(False) if False in equal else len(equal)
