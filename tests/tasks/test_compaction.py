"""The shipped questions after a compaction."""

from kvprobe.tasks.compaction import KINDS, compactions
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
