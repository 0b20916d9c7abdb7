"""Facts, conversations and questions of a few words, for models whose tokenizer knows few or whose context is short."""

import json
from pathlib import Path

from kvprobe.tasks.facts import Fact
from kvprobe.tasks.passcode import Context


def made_up_fact(number: int, kind: str = "code", values: tuple[str, str] = ("b", "d"), padding: int = 0) -> Fact:
    """A fact in the words of the tiny tokenizer."""
    return Fact(
        id=f"{kind}-{number}",
        kind=kind,
        system="be kind",
        chat_user="a day" + " so" * padding,
        chat_assistant="it is",
        fact_user=f"the {kind} is {{fact}} so",
        fact_assistant="well",
        later_user="and the sea?",
        later_assistant="it is cold",
        question=f"what is the {kind}?",
        lead="it is",
        values=values,
    )


FOUR_FACTS = tuple(made_up_fact(number, padding=number) for number in range(4))
"""Facts of different lengths."""


def short_contexts(count: int, longer: str = "") -> tuple[Context, ...]:
    """Short conversations, of which each has its code this much later: those that ship run to a thousand tokens under
    the tiny tokenizer."""
    return tuple(
        Context(
            id=f"short-{number}",
            system="Be kind.",
            chat_user=f"the ride {number}",
            chat_assistant="Ah.",
            ask_summary_1="Sum?",
            summary_1=f"a ride {number}.",
            secret_user=f"{longer * number}the code is {{code}}.",
            secret_assistant="Ta.",
            ask_summary_2="And then?",
            summary_2="the code was told.",
            question="the code?",
            answer="It is",
        )
        for number in range(count)
    )


def gsm8k_questions(folder: Path, count: int) -> Path:
    """A file in the shape of GSM8K."""
    path = folder / "questions.jsonl"
    lines = [
        {
            "question": f"Ann has {n} books and buys {n + 3}. How many are there?",
            "answer": f"{n}+{n + 3}\n#### {2 * n + 3}",
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
