"""What the models `memento` are trained on: the view of a training pass is the one that a cache has."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

from kvprobe.cli.training import train_app
from kvprobe.inference.model import Model, load
from kvprobe.models.unproved import Lane
from kvprobe.policies import policy
from kvprobe.tasks import mementos
from kvprobe.tasks.mementos import PLACES, Trace, block_name, memento_name
from kvprobe.training import schedule
from kvprobe.training.memento import MEMENTOS, TRACES, Memento
from kvprobe.training.schedule import Memory
from tests.refusals import refused
from tests.toy import TINY, follow, toy

VIEWS = [
    TINY,
    replace(TINY, keep=1),
    replace(TINY, keep=2, content="copy"),
    replace(TINY, provenance="recomputed"),
]


@pytest.fixture(scope="module")
def model() -> Model:
    return toy()


def traces_of(recipe: Memento, count: int = 3) -> list[Trace]:
    return recipe.draw(count, np.random.default_rng(5))


def in_one_pass(recipe: Memento, model: Model, traces: Sequence[Trace]) -> torch.Tensor:
    batch = recipe.batch(traces)
    with torch.no_grad():
        output = model.lanes.plain(**batch.inputs, use_cache=False)
    return output.logits[:, batch.counts[0, 1:]]


# The pass, held to caches


@pytest.mark.parametrize(("lane", "at_once"), [("plain", 1), ("hooked", 9)])
@pytest.mark.parametrize("recipe", VIEWS, ids=lambda recipe: recipe.name)
def test_a_training_pass_sees_what_a_cache_sees(recipe: Memento, lane: Lane, at_once: int, model: Model):
    traces = traces_of(recipe)
    _, expected = follow(recipe, model, traces, lane, at_once)
    torch.testing.assert_close(in_one_pass(recipe, model, traces), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("memory", ["hybrid", "mamba"])
def test_a_training_pass_hides_blocks_from_attention_alone(memory: Memory):
    recipe = replace(TINY, memory=memory)
    model, traces = toy(recipe), traces_of(recipe)
    _, expected = follow(recipe, model, traces, at_once=9)
    torch.testing.assert_close(in_one_pass(recipe, model, traces), expected, atol=1e-5, rtol=1e-5)


def test_the_views_differ(model: Model):
    """Otherwise the test above would show nothing."""
    traces = traces_of(TINY)
    passes = [in_one_pass(replace(recipe, content="sum"), model, traces) for recipe in VIEWS]
    for number, one in enumerate(passes):
        for other in passes[:number]:
            assert (one - other)[:, PLACES:].abs().max() > 1e-2
    first = [one[:, :PLACES] for one in passes]  # nothing is hidden yet
    torch.testing.assert_close(torch.stack(first), first[0].expand(len(first), -1, -1, -1))


def test_recomputed_mementos_are_those_of_a_text_without_blocks(model: Model):
    """The other way to say what a restart is: the conversation is read as if no block had been there."""
    recipe = replace(TINY, provenance="recomputed")
    traces = traces_of(recipe)
    last = recipe.blocks
    names = [block_name(number) for number in range(1, last)]
    fresh = model.prefill([row[: row.span(block_name(last)).start] for row in without(model, traces, names)])
    rows = model.tokens([trace.conversation() for trace in traces])
    written = slice(rows[0].span(block_name(last)).start, rows[0].span(memento_name(last)).stop)
    _, logits = model.extend(fresh, [row[written] for row in rows], logits=PLACES + 1)
    torch.testing.assert_close(
        in_one_pass(recipe, model, traces)[:, -PLACES:], logits[:, :PLACES], atol=1e-5, rtol=1e-5
    )


def without(model: Model, traces: Sequence[Trace], names: Sequence[str]):
    return model.tokens([trace.conversation().without(*names) for trace in traces])


# The light cone

REST = ((5, 0, 0, 8, 4), (1, 1, 6, 2, 0), (9, 9, 3, 0, 5))
ONE, OTHER = Trace(((3, 7, 1, 9, 2), *REST)), Trace(((9, 0, 2, 3, 8), *REST))
"""The digits of block 1 differ, but no memento."""


def differs(recipe: Memento, model: Model) -> dict[int, tuple[bool, ...]]:
    """By memento, whether its K and V differ between the two traces, by layer. Each is read alone: rows of one batch
    round otherwise."""
    (one, _), (other, _) = (follow(recipe, model, [trace], at_once=9) for trace in (ONE, OTHER))
    by_memento = {}
    for number in range(1, 1 + recipe.blocks):
        where = one.ledger.in_segments([memento_name(number)])[0]
        parts = [(one.keys, other.keys), (one.values, other.values)]
        by_part = [
            tuple(not torch.equal(a[:, :, where], b[:, :, where]) for a, b in zip(*pair, strict=True)) for pair in parts
        ]
        assert by_part[0] == by_part[1]
        by_memento[number] = by_part[0]
    return by_memento


def test_a_hidden_digit_reaches_later_mementos_in_the_third_layer_first(model: Model):
    """By way of memento 1, which sees it and holds it from the second layer on. What text says is the same here, so
    the first two layers are equal to the bit."""
    assert ONE.mementos == OTHER.mementos
    later = (False, False, True)
    assert differs(TINY, model) == {1: (False, True, True), 2: later, 3: later, 4: later}


def test_it_never_reaches_a_restart(model: Model):
    nowhere = (False,) * 3
    assert differs(replace(TINY, provenance="recomputed"), model) == dict.fromkeys((1, 2, 3, 4), nowhere)


def test_a_kept_block_reaches_the_next_memento_in_the_second_layer(model: Model):
    direct, later = (False, True, True), (False, False, True)
    assert differs(replace(TINY, keep=1), model) == {1: direct, 2: direct, 3: later, 4: later}


# The text


def test_segments_are_blocks_and_mementos_with_the_sign_as_delimiter(model: Model):
    (trace,) = traces_of(TINY, 1)
    (tokens,) = model.tokens(trace.conversation())
    words = [model.tokenizer.decode([number]) for number in tokens.ids]
    assert tuple(words) == trace.words()
    for _, name, text in trace.messages():
        span = tokens.span(name)
        written = [word for word, delimiter in zip(words[span], tokens.delimiters[span], strict=True) if not delimiter]
        assert written == text.split()
        if name.startswith("memento"):
            assert words[span][-PLACES - 1] == "="
    assert [word for word, delimiter in zip(words, tokens.delimiters, strict=True) if delimiter] == [
        "<bos>",
        *"=" * (1 + TINY.blocks),
    ]


def test_asked_to_go_on_a_model_writes_a_memento(model: Model):
    (trace,) = traces_of(TINY, 1)
    (row,) = model.tokens(trace.conversation())
    answer = model.generate(
        [{"role": role, "content": text} for role, _, text in [*trace.messages()][:2]], max_new_tokens=1, stop=[]
    )
    _, expected = model.extend(None, [row[: row.span(memento_name(1)).start + 1]])
    assert answer.tokens[0] == (int(expected[0, -1].argmax()),)


@pytest.mark.parametrize("recipe", [TINY, replace(TINY, provenance="recomputed")], ids=lambda recipe: recipe.name)
def test_the_loss_is_on_the_digits_of_mementos_alone(recipe: Memento):
    traces = traces_of(recipe)
    batch = recipe.batch(traces)
    written = [batch.ids[row, batch.counts[row]].tolist() for row in range(len(traces))]
    words = mementos.vocabulary()
    for trace, ids in zip(traces, written, strict=True):
        assert "".join(words[number] for number in ids) == "".join(f"{stated:03}" for stated in trace.mementos[1:])


# What is right


def test_a_memento_is_right_if_all_its_digits_are_the_likeliest(model: Model):
    """Of traces whose start is what the model would write as some memento, so that not all is wrong."""
    recipe = replace(TINY, content="copy")
    traces = traces_of(recipe, 40)
    said = written(recipe, model, traces)
    starts = [next((text for text in row if text.isdigit()), "000") for row in said]
    traces = [replace(trace, start=int(start)) for trace, start in zip(traces, starts, strict=True)]
    right = recipe.right(model.lanes.plain, traces)
    said = written(recipe, model, traces)
    assert right.tolist() == [
        [text == f"{trace.start:03}" for text in row] for row, trace in zip(said, traces, strict=True)
    ]


def written(recipe: Memento, model: Model, traces: Sequence[Trace]) -> list[list[str]]:
    """The likeliest words of each memento, each given the true ones before it."""
    words = mementos.vocabulary()
    return [
        ["".join(words[number] for number in places) for places in row.reshape(-1, PLACES).tolist()]
        for row in in_one_pass(recipe, model, traces).argmax(-1)
    ]


def test_accuracy_has_mementos_and_whole_traces(model: Model, monkeypatch: pytest.MonkeyPatch):
    right = torch.tensor([[True, True, False, True], [True, True, True, True]])
    monkeypatch.setattr(Memento, "right", lambda *_: right)
    assert TINY.accuracy(model.lanes.plain, np.random.default_rng(0)) == {MEMENTOS: 7 / 8, TRACES: 1 / 2}


# Settings


def test_the_full_size_is_about_that_of_the_paper():
    """810 K there."""
    count = sum(parameter.numel() for parameter in Memento().model().parameters())
    assert count == 807_552
    config = Memento().model().config
    assert (config.num_hidden_layers, config.hidden_size, Memento().blocks) == (4, 128, 10)


def test_names_tell_variants_apart():
    views = [*VIEWS, replace(TINY, memory="hybrid"), replace(TINY, memory="hybrid", blocks=3)]
    names = {replace(recipe, schedule=replace(recipe.schedule, seed=seed)).name for recipe in views for seed in (0, 1)}
    assert len(names) == 2 * len(views)


def test_settings_that_cannot_be_are_refused():
    refused(lambda: replace(TINY, keep=1, provenance="recomputed"), "'keep' is 1", "leave it 0")
    refused(lambda: replace(TINY, memory="hybrid", provenance="recomputed"), "reads each token once", "retained")
    refused(lambda: replace(TINY, keep=4), "'keep' is 4", "expected 0 to 3")
    refused(lambda: replace(TINY, blocks=23), "'blocks' is 23")
    refused(lambda: replace(TINY, tested=0), "'tested' is 0")
    refused(lambda: TINY.batch([Trace(REST)]), "3 blocks", "for 4")


def test_the_command_trains_what_its_flags_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    trained: list[tuple[Memento, Path]] = []

    def train(recipe: Memento, folder: Path) -> dict[str, object]:
        trained.append((recipe, folder))
        return {"accuracy": {"0": {MEMENTOS: 0.0, TRACES: 0.0}, "200": {MEMENTOS: 0.961, TRACES: 0.7}}}

    monkeypatch.setattr("kvprobe.training.loop.train", train)
    flags = {"content": "copy", "keep": 2, "memory": "hybrid", "blocks": 5, "seed": 3, "steps": 400, "out": tmp_path}
    command = ["memento", *(f"--{name}={value}" for name, value in flags.items())]
    train_app(command, exit_on_error=False, result_action="return_value")
    expected = Memento(content="copy", keep=2, memory="hybrid", blocks=5, schedule=schedule.until_95(400, 3))
    assert trained == [(expected, tmp_path / "memento-hybrid-5-copy-retained-2-3")]
    printed = capsys.readouterr().out
    assert "mementos: 96.1% right" in printed
    assert "after 200 steps" in printed


def test_words_of_the_command_line_are_those_of_the_library():
    assert get_args(schedule.Content) == get_args(mementos.Content)
    assert get_args(schedule.Provenance) == get_args(policy.Provenance)


# Models that ship

SHIPPED = {
    **{f"memento-{seed}": (Memento(), 0.97 if seed != 1 else 0.95) for seed in range(3)},
    "memento-0-at-1500": (Memento(), 0.71),
    "memento-0-at-1800": (Memento(), 0.84),
    "memento-keep-1": (Memento(keep=1), 0.96),
    "memento-recomputed": (Memento(provenance="recomputed"), 0.96),
    "memento-copy": (Memento(content="copy"), 0.98),
}
"""The share of mementos that the card of each reports."""


WITH_STATES = {
    "hybrid-0": 0.965,
    "hybrid-1": 0.959,
    "recurrent-0": 0.971,
    "recurrent-1": 0.978,
    "attention-0": 0.961,
    "attention-1": 0.97,
}


@pytest.mark.parametrize("name", WITH_STATES)
def test_models_with_other_memories_are_as_right_as_their_card_says(name: str):
    recipe = Memento(blocks=5)
    traces = recipe.draw(100, np.random.default_rng(1))
    right = recipe.right(load(f"memento-{name}").lanes.plain, traces)
    assert right.double().mean().item() == pytest.approx(WITH_STATES[name], abs=0.04)


@pytest.mark.parametrize("name", SHIPPED)
def test_models_that_ship_are_as_right_as_their_card_says_on_both_lanes(name: str):
    recipe, share = SHIPPED[name]
    model, traces = load(name), recipe.draw(100, np.random.default_rng(1))
    assert recipe.right(model.lanes.plain, traces).double().mean().item() == pytest.approx(share, abs=0.04)
    rows = model.tokens([trace.conversation() for trace in traces[:2]])
    (_, plain), (_, hooked) = (model.extend(None, rows, lane=lane, logits=10) for lane in get_args(Lane))
    torch.testing.assert_close(plain, hooked, atol=1e-4, rtol=1e-4)
