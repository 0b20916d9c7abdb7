"""The poisoning study on worked solutions: how they are put to a language model, how answers are read, a whole run."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model, load
from kvprobe.studies import poisoning
from kvprobe.studies.poisoning import Config
from kvprobe.studies.poisoning.cases import DRAFTS, HISTORY, chances
from kvprobe.studies.poisoning.collect import edits, results
from kvprobe.studies.poisoning.stories import Story, draw_story, exchange, last_number, parted, written
from kvprobe.tasks.gsm8k import REQUEST
from kvprobe.tasks.solutions import WorkedProblem, worked_problems
from kvprobe.tasks.worded_steps import EARLIER, LATER_STEPS, STEP
from kvprobe.text.tokens import Tokens
from kvprobe.text.turns import Turns
from tests import models
from tests.refusals import refused
from tests.studies.runs import assert_figures

COUNT = 2
SMALL = Config(task="beads", problems=COUNT, new=8)
STRIPES = WorkedProblem(
    "A flag has 3 rows of 9 stars. 5 fell off, and 4 were painted over. How many stars can be seen?",
    (
        "First, all stars are counted.",
        "There are 3*9=<<3*9=27>>27 stars.",
        "Some of them fell off.",
        "So 27-5=<<27-5=22>>22 are left.",
        "And 22-4=<<22-4=18>>18 can be seen.",
    ),
    "18",
)


@pytest.fixture(scope="module")
def tiny() -> Model:
    """A random model with the tokens of a language model."""
    tokenizer = load("smollm2-135m").tokenizer
    return models.llama(tokenizer=tokenizer, vocab_size=len(tokenizer))


def story(model: Model, wrong: str = "28", examples: int = 0) -> Story:
    problems = [STRIPES, *worked_problems("beads", HISTORY, seed=0)]
    drawn = draw_story(Turns.of(model), problems, examples, np.random.default_rng(0))
    return Story(drawn.turns, drawn.problem, drawn.place, wrong, drawn.others, examples)


def text_of(model: Model, tokens: Tokens) -> str:
    return model.tokenizer.decode(list(tokens.ids))


def test_drafts_differ_in_one_value_and_have_the_same_segments(tiny: Model):
    case = story(tiny)
    drafts = case.drafts()
    for draft, value in zip(DRAFTS, ("27", "28"), strict=True):
        tokens = drafts[draft]
        assert text_of(tiny, tokens[tokens.span(EARLIER)]) == "First, all stars are counted.\n"
        assert text_of(tiny, tokens[tokens.span(STEP)]) == f"There are 3*9={value} stars.\n"
    sound, slip = (drafts[draft].ids for draft in DRAFTS)
    assert sum(one != other for one, other in zip(sound, slip, strict=True)) == 1
    rest = case.rest()
    assert set(rest.later.segments) == {LATER_STEPS}
    assert text_of(tiny, rest.later + rest.lead) == "Some of them fell off.\nSo 2"
    assert [tiny.tokenizer.decode([token]) for token in (rest.right, rest.wrong)] == ["7", "8"]


def test_each_arm_puts_the_same_lines_in_its_own_way(tiny: Model):
    case = story(tiny, examples=1)
    answer = written(case.lines("slip"))
    assert answer == "First, all stars are counted.\nThere are 3*9=28 stars.\nSome of them fell off.\n"
    texts = {(arm.name, arm.draft): text_of(tiny, arm.prompt) for arm in case.arms()}
    assert len(texts) == 2 * 7 + 1
    begun = text_of(tiny, case.asked)
    assert begun.count(REQUEST) == 2
    assert texts["fresh", "slip"] == begun
    assert texts["continue", "slip"] == begun + answer
    assert texts["wait", "slip"] == f"{begun}First, all stars are counted.\nThere are 3*9=28 stars.\nWait,"
    assert texts["continue", "sound"] == texts["continue", "slip"].replace("=28", "=27")
    for name in ("handed", "other's"):
        assert texts[name, "slip"].count(answer) == 1
        assert begun not in texts[name, "slip"]
    for name in ("ordered", "review", "erratum"):
        assert texts[name, "slip"].startswith(begun + answer.strip())
    assert "it should be: There are 3*9=27 stars." in texts["erratum", "slip"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So 27-5=22 are left.\n22-4=18\n#### 18", (1, 0, 1, 0, 1)),
        ("So 28-5=23 are left.\n23-4=19\n#### 19", (0, 1, 1, 0, 1)),
        ("3*9=27, so 27-5=21. #### 15", (0, 0, 1, 1, 0.5)),
        ("18", (0, 0, 0, 0, None)),
        ("#### $18.", (1, 0, 1, 0, None)),
    ],
)
def test_answers_are_read_by_their_last_line(tiny: Model, text: str, expected: tuple[float | None, ...]):
    outcome = story(tiny).outcome(text)
    local = outcome.pop("local")
    assert (*outcome.values(), None if np.isnan(local) else local) == expected


def test_worked_alone_the_line_is_reviewed_and_what_came_of_it_handed_over(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
):
    said = iter(["There are 3*9=27 stars.", "So 27-5=22.\n22-4=18\n#### 18"] + ["No idea."] * 2)
    asked: list[str] = []

    def reply(_: Model, prompts: list[Tokens], **__: int) -> SimpleNamespace:
        asked.append(text_of(tiny, prompts[0]))
        return SimpleNamespace(text=next(said))

    monkeypatch.setattr(Model, "generate", reply)
    assert story(tiny).alone(tiny, "slip", 20) == {"right": 1, "ends": 1}
    assert "There are 3*9=28 stars.\n" in asked[0]
    assert "So 2" not in asked[0]
    assert "There are 3*9=27 stars.\nSome of them fell off.\n" in asked[1]
    assert story(tiny).alone(tiny, "slip", 20) == {"right": 0, "ends": 0}


def test_the_last_answer_counts():
    assert last_number("#### 3 and then #### 1,200") == 1200
    assert last_number("it is 5") is None


def test_earlier_exchanges_are_wrong_as_often_as_is_said_and_the_step_is_the_same(tiny: Model):
    case = story(tiny)
    histories = case.histories(np.random.default_rng(1))
    for wrong, history in enumerate(histories):
        text = text_of(tiny, history.prompt)
        assert history.wrong == wrong
        assert text.endswith("There are 3*9=2")
        assert text.count("#### ") == HISTORY + text.count("'#### <number>'")
        assert sum(exchange(other)[1] in text for other in case.others) == HISTORY - wrong
        assert tiny.tokenizer.decode(list(history.result)) == "7"
    table = results(tiny, case.histories(np.random.default_rng(1)))
    read = history.prompt
    logits = tiny.extend(None, [read])[1][0, -1]
    assert table["log_probability"].iloc[-1] == pytest.approx(
        float(logits.log_softmax(-1)[history.result[0]]), rel=1e-4
    )


def test_the_sound_run_has_no_damage_and_a_wrong_step_out_of_the_way_leaves_none(tiny: Model):
    by_edit = edits(tiny, story(tiny)).query("layer == -1").set_index("edit")
    assert by_edit.loc["sound", "kl"] == 0
    assert by_edit.loc["restarted slip", "margin"] == pytest.approx(by_edit.loc["restarted sound", "margin"], abs=1e-5)
    assert by_edit.loc["slip", "margin"] != by_edit.loc["sound", "margin"]


def test_own_mistakes_are_drawn_by_the_models_own_probabilities(tiny: Model):
    problems = [STRIPES, *worked_problems("beads", HISTORY, seed=0)]
    drawn = [draw_story(Turns.of(tiny), problems, 0, np.random.default_rng(seed), tiny) for seed in range(30)]
    assert len({case.wrong for case in drawn}) > 3
    assert all(case.wrong in {wrong for _, wrong in STRIPES.wrongs(case.place)} for case in drawn)
    ids = [drawn[0].turns.ids(drawn[0].until + value) for value in ("21", "22", "28")]
    likely = chances(tiny, drawn[0].asked, ids)
    asked = drawn[0].asked
    logits = tiny.extend(None, [asked + drawn[0].turns.after(asked, "answer", drawn[0].until + "2")])[1][0, -1]
    expected = logits[[row[-1] for row in ids]].softmax(-1).tolist()
    assert likely == pytest.approx(expected, rel=1e-4)


def test_texts_that_do_not_part_are_refused():
    assert parted([[1, 2, 3], [1, 4]]) == ([1], [2, 3], [4])
    refused(lambda: parted([[1], [2]]), "no tokens that differ at one place")


def test_a_run_on_drawn_problems_and_one_on_a_file(tiny: Model, tmp_path: Path):
    run = poisoning.run(SMALL, tmp_path, model=tiny)
    findings = Conclusion.of(run.metrics).findings
    assert set(findings.values("right", "arm")) == {
        "continue", "wait", "ordered", "review", "other's", "handed", "erratum", "fresh", "alone"
    }  # fmt: skip
    assert "notices" not in findings
    assert not [finding for finding in findings.where("lift") if finding.keys["over"] == "harmless"]
    assert_figures(run, "right_by_arm", "undone_by_layer", "right_after_errors", "attention_by_layer")
    assert run.metrics["controls"][0]["holds"]

    entry = {"question": STRIPES.question, "answer": "\n".join(STRIPES.lines) + f"\n#### {STRIPES.answer}"}
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join([json.dumps(entry)] * (COUNT + HISTORY)), encoding="utf-8")
    mine = Config(task=f"gsm8k:{file}", problems=COUNT, new=8, mistake="own")
    assert poisoning.run(mine, tmp_path, model=tiny).df()["case"].nunique() == COUNT
    refused(lambda: Config(task="bead"), "task", "beads")
