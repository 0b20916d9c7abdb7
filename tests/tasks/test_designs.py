"""Designs: labels crossed with contexts, and what is no design."""

from typing import get_args

import numpy as np
import pytest

from kvprobe.inference.model import Model
from kvprobe.studies.leakage import SecretKind
from kvprobe.tasks.designs import Design, Sample, Target
from kvprobe.tasks.passcode import conversation
from kvprobe.tasks.secrets import KINDS, secret
from kvprobe.text.transcript import Transcript
from tests.refusals import refused

CHAT = Transcript.from_messages([{"role": "user", "content": "hello"}], ["T1"])


def test_crossing_gives_every_context_its_own_texts_with_their_labels():
    made = {
        name: lambda text, name=name: Transcript.from_messages([{"role": "user", "content": name + text}])
        for name in "xy"
    }
    design = Design.crossed(made, [["0", "1"], ["1", "1"]], lambda text: (int(text),), Target("bit", ("no", "yes")))
    assert [(sample.context, sample.labels, sample.transcript.messages[0].text) for sample in design.samples] == [
        ("x", (0,), "x0"),
        ("x", (1,), "x1"),
        ("y", (1,), "y1"),
        ("y", (1,), "y1"),
    ]


def test_a_column_of_labels_becomes_classes_in_order():
    design = Design.labelled([CHAT] * 3, ["b", "a", "b"], ["x", "y", "z"], "mood")
    assert design.target == Target("mood", ("a", "b"))
    assert [sample.labels for sample in design.samples] == [(1,), (0,), (1,)]
    refused(lambda: Design.labelled([CHAT], ["a", "b"], ["x"]), "one label and one context")
    refused(lambda: Design.labelled([CHAT] * 2, ["a", float("nan")], ["x", "y"]), "1 of 2 labels are NaN")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Target("one", ("a",)), "at least two"),
        (lambda: Target("twice", ("a", "a")), "all of them different"),
        (lambda: Target("nothing", ("a", "b"), ()), "has no place; give it at least one"),
        (lambda: Design((), Target("t", ("a", "b"))), "has no samples"),
        (lambda: Design((Sample(CHAT, (0, 1), "x"),), Target("t", ("a", "b"))), "needs 1"),
        (lambda: Design((Sample(CHAT, (2,), "x"),), Target("t", ("a", "b"))), "0 to 1"),
        (
            lambda: Design((Sample(CHAT, (0,), "x"), Sample(CHAT, (1,), "x", 0)), Target("t", ("a", "b"))),
            "every sample a slot, or none",
        ),
    ],
)
def test_an_inconsistent_target_or_design_is_refused(make, words: str):
    refused(make, words)


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_are_hidden_in_one_turn_asked_for_in_the_last_and_shift_nothing(smol: Model, kind: str):
    hidden = secret(kind)
    design = hidden.design(7, 5, np.random.default_rng(0), smol.tokenizer)
    assert len(design.samples) == 35
    assert len({sample.context for sample in design.samples}) == 7
    for first in range(0, 35, 5):
        rows = [sample.transcript.tokens(smol.tokenizer) for sample in design.samples[first : first + 5]]
        assert len({row.parts for row in rows}) == 1
        texts = {row.ids[row.part("code")] for row in rows}
        assert len(texts) == 5
        for row in rows:
            assert row.ids[row.part("code")] == row.ids[row.part("answer")]
            assert {name for name, part in zip(row.segments, row.parts, strict=True) if part} == {"T2", "T3"}
        # Nothing between tells it.
        summaries = {row.ids[row.span("summary2")] for row in rows}
        assert len(summaries) == 1


@pytest.mark.parametrize("kind", ["name", "topic", "sentiment"])
def test_each_label_has_many_texts(smol: Model, kind: str):
    hidden = secret(kind)
    counts = np.bincount(list(hidden.label_of.values()))
    assert counts.min() >= 10
    assert len(counts) == len(hidden.target.classes)
    drawn = hidden.draw(20, 12, np.random.default_rng(1), smol.tokenizer)
    assert drawn == hidden.draw(20, 12, np.random.default_rng(1), smol.tokenizer)
    assert all(len(set(texts)) == 12 for texts in drawn)
    refused(lambda: hidden.draw(1, 1000, np.random.default_rng(1), smol.tokenizer), "were asked for in each context")


def test_a_code_s_labels_are_its_digits_and_the_study_knows_all_kinds():
    assert secret("code").labels("40213") == (4, 0, 2, 1, 3)
    assert secret("topic").target.classes[secret("topic").labels("jazz")[0]] == "music"
    assert get_args(SecretKind) == KINDS
    refused(lambda: secret("topc"), "did you mean 'topic'")
    context = secret("name").contexts[3]
    assert "{code}" not in conversation(context, "Anna Bell").messages[5].text
