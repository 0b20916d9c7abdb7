"""Reading one conversation under every arm.

It is read once up to the code; the codes are rows of one batch from there to the end of the second summary. There every
arm acts on what was read. What follows is the same text under all arms, at the positions that each calls for. Arms that
no code can reach are read once.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvprobe.cache.cache import KVCache
from kvprobe.inference.forced import forced_logits
from kvprobe.inference.forward import onwards
from kvprobe.inference.model import Model
from kvprobe.inference.outcomes import divergence
from kvprobe.inference.sweep import first_divergence
from kvprobe.models.lens import Family
from kvprobe.probing.arms import arm_read_outs
from kvprobe.probing.variants import Logits, Variants
from kvprobe.studies.compaction import Config
from kvprobe.studies.compaction.arms import ARMS, HIDDEN_SEGMENTS, MASK, RECOMPUTED, RESTART, RETAINED
from kvprobe.studies.compaction.replies import answers_after, read_on, reply_logits
from kvprobe.studies.compaction.shares import attention_shares
from kvprobe.tasks.compaction import KINDS, Compaction, asked, compacted_conversation, going_on, unrelated
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
WORTH = ("same", "prefix", "right")
"""Of an answer: whether it is that of the full context; the share of that one's tokens before the first that differs;
and whether it holds the words of a right answer, NaN where there is none."""


def read_context(
    model: Model,
    context: Context,
    compaction: Compaction,
    filler: Sequence[Context],
    codes: Sequence[str],
    config: Config,
) -> tuple[dict[str, Tensor], list[str]]:
    """Everything that is measured on one context.

    Returns:
        Tensors: `arm.family` of shape `[rows, layers, reads, dim]` of T3 under each arm, one row per code or one in all
        for the recomputed arms; the digits as `labels` `[codes, digits]`; what `use_measurements` gives for `ASKED`;
        what `continuation` gives; `attention` `[seen, layers, heads, looked_at]`, how T3's queries share out theirs;
        and `worth` `[conditions, kinds, worth]` of the answers. And their texts; see `answers`.
    """
    chats = [compacted_conversation(context, compaction, code) for code in codes]
    variants = Variants.of(chats, model.tokenizer)
    layout = variants.layout
    third, ask = layout.span("T3").start, layout.span("ask").start
    tensors, cache, restarted = leak_and_use(model, variants, config.batch)
    rows = conditions(model, cache, restarted, layout[:third], filler)
    tensors |= continuation(model, rows, layout[third : layout.part("reply").start], config.continuation)
    tensors["attention"] = attention(model, rows.rows([CONDITIONS.index(name) for name in SEEN]), layout[third:ask])
    tensors["labels"] = torch.tensor([[int(digit) for digit in code] for code in codes])
    tensors["worth"], texts = answers(model, rows, chats[0], compaction, config)
    return tensors, texts


def leak_and_use(model: Model, variants: Variants, batch: int) -> tuple[dict[str, Tensor], KVCache, dict[str, KVCache]]:
    """What T3's slots hold of the code under each arm, and what the model answers about it; and the caches up to T3:
    that of the first code's conversation, and those of the recomputed arms by name."""
    layout = variants.layout
    start, third, answer = layout.part("code").start, layout.span("T3").start, layout.part("answer")
    slots = range(layout.span("ask").start - third)
    prefix = model.prefill(layout[:start])
    first, _ = model.extend(prefix, [layout[start:third]])
    shared: dict[str, Tensor] = {}
    restarted = {arm.name: model.apply(arm.policy, first) for arm in RECOMPUTED}
    read_on: dict[str, tuple[KVCache, Tensor]] = {}
    for arm in RECOMPUTED:
        cache = restarted[arm.name]
        asking = onwards(cache, [layout[third : answer.start]])
        again = model.capture(asking, FAMILIES, slots=slots, past=cache, keep_cache=True)
        assert again.cache is not None
        read_on[arm.name] = again.cache, again.logits
        shared |= arm_read_outs(arm.name, again)

    def read(rows: Sequence[Tokens]) -> tuple[dict[str, Tensor], list[Logits]]:
        cache, _ = model.extend(prefix, [row[start:third] for row in rows])
        # The last code token is never fed: its probability is read off the token before it.
        asking, code_tokens = [row[third : answer.stop - 1] for row in rows], answer.stop - answer.start
        tensors, logits = dict[str, Tensor](), [model.extend(cache, asking, logits=code_tokens)[1]]
        for arm in ARMS:
            if arm.name in read_on:
                past, before = read_on[arm.name]
                logits.append(forced_logits(model, past, before, onwards(past, [row[answer] for row in rows])))
                continue
            acted = model.apply(arm.policy, cache)
            turn = model.capture(onwards(acted, asking), FAMILIES, slots=slots, past=acted, logits=code_tokens)
            tensors |= arm_read_outs(arm.name, turn)
            logits.append(turn.logits)
        return tensors, logits

    return variants.read(batch, read) | shared, first, restarted


def conditions(
    model: Model, cache: KVCache, restarted: dict[str, KVCache], tokens: Tokens, filler: Sequence[Context]
) -> KVCache:
    """The caches of all `CONDITIONS` after compaction, as rows of one batch."""
    other = model.prefill(unrelated(tokens, HIDDEN_SEGMENTS, filler, model.tokenizer))
    compacted = restarted | {arm.name: model.apply(arm.policy, cache) for arm in RETAINED}
    calibration = [other, *(model.apply(arm.policy, other) for arm in (MASK, RESTART))]
    return KVCache.join([cache, *(compacted[arm.name] for arm in ARMS), *calibration])


def continuation(model: Model, rows: KVCache, turn: Tokens, length: int) -> dict[str, Tensor]:
    """What every condition makes of the reply that the full context gives to `turn`, and the calibration of that which
    its own full context gives.

    Returns:
        Of shape `[conditions, length]`, NaN after the reply's end: `reply_kl` from that full context, whether both hold
        the same token likeliest (`agree`), and `between`, KL from the restarted to the masked arm of each of `PAIRS`,
        in the row of the masked one.
    """
    kl, agree, between = (torch.full((len(CONDITIONS), length), torch.nan) for _ in range(3))
    for group, (masked, restarted) in zip((ASKED, CALIBRATION), PAIRS, strict=True):
        places = [CONDITIONS.index(name) for name in group]
        logits = reply_logits(model, rows.rows(places), turn, length)
        count = logits.shape[1]
        distance, same = divergence(logits[:1].expand_as(logits), logits)
        kl[places, :count], agree[places, :count] = distance.cpu(), same.float().cpu()
        apart, _ = divergence(logits[group.index(restarted)], logits[group.index(masked)])
        between[CONDITIONS.index(masked), :count] = apart.cpu()
    return {"reply_kl": kl, "agree": agree, "between": between}


def attention(model: Model, rows: KVCache, turn: Tokens) -> Float[Tensor, "rows layers heads looked_at"]:
    """How the queries of `turn` share out their attention among `LOOKED_AT` under each of these caches."""
    ledger = rows.ledger
    system, hidden = ledger.in_segments(["system"]), ledger.in_segments(HIDDEN_SEGMENTS)
    summaries = ledger.in_segments([name for name in ledger.names if name.startswith("summary")])
    first = (torch.arange(rows.slots, device=system.device) == 0).expand_as(system)
    return attention_shares(model, rows, turn, [first, system & ~first, hidden, summaries]).cpu()


def answers(
    model: Model, rows: KVCache, chat: Transcript, compaction: Compaction, config: Config
) -> tuple[Float[Tensor, "conditions kinds worth"], list[str]]:
    """Greedy answers to the three questions, asked after so many turns, under every condition: what each is worth
    (`WORTH`), and their texts, condition by condition."""
    later = going_on(chat, compaction, config.turns)
    asking = [asked(later, compaction.question(kind)).tokens(model.tokenizer, generation_prompt=True) for kind in KINDS]
    third, ask = asking[0].span("summary2").stop, asking[0].span("ask").start
    after = read_on(model, rows, asking[0][third:ask])
    said = answers_after(model, after, [question[ask:] for question in asking], config.answer)
    worth = torch.full((len(CONDITIONS), len(KINDS), len(WORTH)), torch.nan)
    for row, (tokens, text) in enumerate(zip(said.tokens, said.texts, strict=True)):
        place, number = divmod(row, len(KINDS))
        full = CALIBRATION[0] if CONDITIONS[place] in CALIBRATION else "full"
        expected = said.tokens[CONDITIONS.index(full) * len(KINDS) + number]
        words, differs = compaction.answer(KINDS[number]), first_divergence(expected, tokens)
        prefix = 1.0 if differs is None else differs / len(expected)
        right = torch.nan if words is None else float(words.lower() in text.lower())
        worth[place, number] = torch.tensor([differs is None, prefix, right])
    return worth, list(said.texts)
