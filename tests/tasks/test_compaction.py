"""The shipped questions after a compaction, and conversations whose hidden turns say other things."""

from dataclasses import replace
from typing import Any

import numpy as np

from kvprobe.tasks.compaction import KINDS, compacted_conversation, compactions, unrelated
from kvprobe.tasks.passcode import contexts


def test_the_answers_are_where_the_questions_say_they_are():
    for context, compaction in zip(contexts(), compactions(), strict=True):
        hidden = " ".join([context.chat_user, context.chat_assistant, context.secret_user, context.secret_assistant])
        summaries = f"{context.summary_1} {context.summary_2}".lower()
        spoken = (context.system, context.ask_summary_1, context.ask_summary_2, context.question, context.answer)
        seen = " ".join((summaries, *spoken, compaction.followup_user, compaction.followup_assistant)).lower()
        assert compaction.summary_answer.lower() in summaries, context.id
        assert compaction.hidden_answer.lower() in hidden.lower(), context.id
        assert compaction.hidden_answer.lower() not in seen, context.id
        for kind in KINDS:
            words = compaction.answer(kind)
            assert words is None or words.lower() not in compaction.question(kind).lower(), context.id
    assert len({compaction.id for compaction in compactions()}) == len(contexts())


def test_unrelated_turns_change_the_text_of_their_segments_and_nothing_else(tokenizer: Any):
    tokens = compacted_conversation(contexts()[0], compactions()[0], "48213").tokens(tokenizer)
    other = unrelated(tokens, ("T1", "T2"), contexts()[1:], tokenizer)
    assert replace(other, ids=tokens.ids) == tokens
    changes = [token != changed for token, changed in zip(tokens.ids, other.ids, strict=True)]
    free = [name in ("T1", "T2") and not chat for name, chat in zip(tokens.segments, tokens.delimiters, strict=True)]
    assert not any(changed for changed, own in zip(changes, free, strict=True) if not own)
    assert np.mean([changed for changed, own in zip(changes, free, strict=True) if own]) > 0.9
