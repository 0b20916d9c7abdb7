"""Wrong answers in code: what is made of an answer, what a fix is, and planted numbers that must be found again."""

from itertools import product

import numpy as np
import pandas as pd
import pytest

from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.model import Model
from kvprobe.studies.code_poisoning import Config
from kvprobe.studies.code_poisoning.answers import FIXES, NOTHING, Answer, code_in, fix_of, judged, substance
from kvprobe.studies.code_poisoning.coder import Coder, CodeReply
from kvprobe.studies.code_poisoning.collect import inputs
from kvprobe.studies.code_poisoning.conclude import conclude
from kvprobe.studies.code_poisoning.drafts import PART, REVIEW, Draft, reported
from kvprobe.studies.code_poisoning.noticing import PLACES, READERS, TEXT, with_places
from kvprobe.studies.code_poisoning.routes import ROUTES, Journey
from kvprobe.studies.code_poisoning.sandboxed import outcomes
from kvprobe.studies.code_poisoning.study import STUDY
from kvprobe.studies.code_poisoning.tasks import KINDS, all_tasks, tasks
from tests.models import llama

MODEL = "wordy"
SMALL = Config(tasks=8, draws=1, rounds=1, new=8, rows=128)
HOLD = [True, True, False, False]
"""A tiny random model writes no code."""
TEMPLATES = 16


# ---- tasks


def test_solutions_pass_their_tests_and_each_bug_is_one_line_that_fails_one():
    assert len(all_tasks()) == 96
    assert len({task.template for task in all_tasks()}) == 32
    for task in all_tasks():
        for function in (task.whole, task.step):
            assert not [outcome for outcome in function.expected if outcome.startswith("<")], function.call
        for bug in task.bugs:
            lines = zip(task.whole.code.splitlines(), bug.code.splitlines(), strict=True)
            assert [place for place, (right, wrong) in enumerate(lines) if right != wrong] == [bug.line]
            assert tuple(outcomes(bug.code, task.whole.name, task.whole.tests)) != task.whole.expected, bug
    assert {tuple(bug.kind for bug in task.bugs) for task in all_tasks()} == {KINDS}


# ---- answers


def test_the_code_of_an_answer_is_the_function_that_was_asked_for():
    block = "```python\nimport math\nK = 2\ndef f(x):\n    return x\n\nprint(f(1))\nassert False\n```"
    assert code_in(f"Here:\n{block}\nIt works.", "f") == "import math\nK = 2\n\ndef f(x):\n    return x"
    assert code_in("def f(x): return 1", "f") == "def f(x):\n    return 1"
    assert code_in(block, "g") == ""
    assert code_in("```python\ndef f(x):\n    return (", "f") == ""
    assert code_in("```python\ndef f(x):\n    return x\n\ndef test():\n    assert f(", "f") == "def f(x):\n    return x"
    assert code_in("(" * 7000, "f") == ""
    assert code_in(f"def f(x):\n    return {'x + ' * 1900}x", "f") == ""


def test_names_comments_annotations_and_documentation_are_not_the_substance():
    plain = "def f(xs):\n    n = 0\n    for x in xs:\n        n += x\n    return n"
    dressed = 'def g(items: list) -> int:\n    """Sum."""\n    total = 0\n    for item in items:\n        total += item\n    return total'  # noqa: E501
    assert substance(plain) == substance(dressed)
    assert substance(plain) != substance(plain.replace("+=", "-="))
    assert substance(plain) != substance(plain.replace("in xs", "in n"))


def test_a_fix_is_of_one_kind():
    wrong = Answer("def f(x):\n    return x", ("1", "2"), False)
    kinds = {
        "right": Answer("def f(x):\n    return x + 1", ("2", "3"), True),
        "new": Answer("def f(x):\n    return 0", ("0", "0"), False),
        "same": Answer("def f(x):\n    return x + 0", ("1", "2"), False),
        "cosmetic": Answer("def f(y):\n    return y", ("1", "2"), False),
        "repeated": wrong,
        "none": NOTHING,
    }
    assert {kind: fix_of(wrong, answer) for kind, answer in kinds.items()} == {kind: kind for kind in FIXES}


def test_a_report_is_the_first_test_that_fails():
    task = tasks(1)[0]
    right, wrong = judged(task.whole, [task.whole.code, task.bugs[0].code])
    assert right.right
    assert not wrong.right
    assert reported(task.whole, wrong) == (
        "The tests fail: count_multiples([3, 1, 2, 12, 24]) returns 4, but 3 is right."
    )


# ---- conversations


def test_the_part_that_may_be_wrong_is_one_line_in_the_same_place(wordy: Model):
    coder, task = Coder(wordy, 4, 8), tasks(3)[2]
    for bug in task.bugs:
        rows = {}
        for kind in ("planted", "sound"):
            draft = Draft.written(kind, task, bug, NOTHING)
            tokens = draft.conversation(coder, REVIEW)
            part = tokens.span(PART)
            assert wordy.tokenizer.decode(tokens.ids[part]).strip() == draft.parts[1].strip()
            assert draft.text == f"```python\n{(bug if kind == 'planted' else task.whole).code}```"
            rows[kind] = tokens[: part.start], with_places(tokens)
        assert rows["planted"][0] == rows["sound"][0]
        for _, marked in rows.values():
            assert [name for name in marked.names if name in PLACES] == list(PLACES)


def test_a_masked_part_is_seen_by_later_tokens_and_a_part_left_out_by_none(wordy: Model):
    """What is hidden differs between a bug and no bug; only where later tokens have seen it may logits differ."""
    coder, task = Coder(wordy, 4, 8), tasks(3)[2]
    bug = task.bugs[1]
    pairs = [
        {arm: prompt for arm, _, prompt in Draft.written(kind, task, bug, answer).arms(coder, tasks(1)[0].whole)}
        for kind, answer in (("planted", judged(task.whole, [bug.code])[0]), ("sound", NOTHING))
    ]
    left = [pair["recomputed"].tokens for pair in pairs]
    assert left[0].ids == left[1].ids
    assert PART not in left[0].segments
    assert pairs[0]["masked"].hidden == PART
    cache, unread = coder._past([pairs[0]["masked"]])
    assert not bool(cache.ledger.live[..., pairs[0]["masked"].tokens.span(PART)].any())
    assert len(cache.ledger.tokens[0]) + len(unread[0]) == len(pairs[0]["masked"].tokens)


def test_answers_come_back_in_order_as_if_each_was_asked_for_alone(wordy: Model):
    task = tasks(3)[2]
    alone, batched = Coder(wordy, 8, 1), Coder(wordy, 8, 4)
    planted = Draft.written("planted", task, task.bugs[1], judged(task.whole, [task.bugs[1].code])[0])
    prompts = [prompt for _, _, prompt in planted.arms(batched, tasks(1)[0].whole)]
    replies = batched.replies(prompts)
    assert [reply.text for reply in replies] == [reply.text for reply in alone.replies(prompts)]
    assert [reply.read for reply in replies] == [len(prompt.tokens) for prompt in prompts]
    assert len({reply.text for reply in batched.replies([prompts[0]] * 6, seed=1)}) > 1
    assert [reply.text for reply in batched.replies([prompts[0]] * 6, seed=1)] == [
        reply.text for reply in alone.replies([prompts[0]] * 6, seed=1)
    ]


def test_what_a_conversation_costs_counts_each_token_once():
    def answered(read: int, generated: int) -> CodeReply:
        return CodeReply("a", read, generated, 1.0, 10)

    journey = Journey(tasks(1)[0].whole, "ask")
    journey.say("ask", anew=True)
    journey.took(answered(100, 20), NOTHING)
    journey.say("again", anew=False)
    journey.took(answered(130, 20), NOTHING)
    assert journey.read + journey.generated == journey.longest == 150
    journey.say("anew", anew=True)
    journey.took(answered(100, 20), NOTHING)
    assert (journey.read + journey.generated, journey.longest) == (270, 150)


# ---- findings


def made_up(**right: float) -> dict[str, pd.DataFrame]:
    """Tables of a run, with a share of templates at which each arm is right after a wrong answer."""
    shares = {"review": 0.25, "critique": 0.25, "masked": 0.5, "recomputed": 0.5, "other's": 0.25, "failing": 0.5,
              "warned": 0.75, "fresh": 0.75, "next": 0.5} | right  # fmt: skip
    samples, seen, routes, probes, first = [], [], [], [], []
    for case in range(TEMPLATES):
        at = {"sample": case, "template": case}
        for draft, (arm, share) in product(("own wrong", "planted", "own right", "sound"), shares.items()):
            wrong = draft in ("own wrong", "planted")
            if not wrong and arm in ("failing", "warned"):
                continue
            value = float(case % 4 < 4 * share) if wrong else float(case != 3)
            fix = "" if arm == "next" or not wrong else "right" if value else list(FIXES)[1 + case % 5]
            samples.append({**at, "draft": draft, "arm": arm, "right": value, "fix": fix, "code": 1.0, "first": "a 1",
                            "text": "a 1"})  # fmt: skip
        for draft, asked in product(("own wrong", "planted", "own right", "sound"), ("own", "other's")):
            chance = (0.6 if draft in ("own wrong", "planted") else 0.4) + case / 1000
            seen.append({**at, "draft": draft, "asked": asked, "suspects": chance})
        for place, route in enumerate(ROUTES):
            routes.append({**at, "route": route, "right": float(case % 4 <= place), "generated": 50.0,
                           "tokens": 100.0 * (place + 1) + case, "cache": 1000.0, "seconds": 1.0})  # fmt: skip
        for place, reader in [*product(PLACES, (*READERS, "hash")), ("at", TEXT)]:
            known = place != "before" and reader not in ("hash", TEXT)
            for copy in (0, 1):
                right = 1.0 if known and case else float(copy)
                probes.append({"sample": 2 * case + copy, "template": case, "place": place, "reader": reader,
                               "right": right})  # fmt: skip
        for how in ("likeliest", "drawn"):
            first.append({**at, "how": how, "right": float(case % 4 < 3), "text": "a 1", "code": 1.0})
    tables = {"samples": samples, "suspicions": seen, "routes": routes, "probes": probes, "first": first}
    return {name: pd.DataFrame(rows) for name, rows in tables.items()}


MADE_UP = Config(tasks=TEMPLATES)


def concluded(tables: dict[str, pd.DataFrame]) -> Conclusion:
    return conclude(tables, MADE_UP, llama())


def example() -> tuple[Config, Conclusion]:
    return MADE_UP, concluded(made_up())


def test_planted_numbers_are_found():
    findings = example()[1].findings
    for kind in ("own wrong", "planted"):
        assert findings.at("restart", draft=kind).mean == pytest.approx(0.5)
        assert findings.at("warned", draft=kind).mean == pytest.approx(0.25)
        assert findings.at("masked", draft=kind).mean == pytest.approx(0.25)
        assert findings.at("cleared", draft=kind).mean == findings.at("handed", draft=kind).mean == 0.0
        assert findings.at("poisons", draft=kind).mean == pytest.approx(15 / 16 - 0.25)
        assert findings.at("spreads", draft=kind).mean == pytest.approx(15 / 16 - 0.5)
        assert findings.at("left", arm="review", draft=kind).mean == pytest.approx(0.75)
        shares = [findings.at("fix", draft=kind, arm="review", fix=fix).mean for fix in FIXES]
        assert sum(shares) == pytest.approx(1.0)
        assert shares[0] == pytest.approx(0.25)
        assert findings.at("suspects", draft=kind, asked="own").mean == pytest.approx(0.2)
    assert findings.at("breaks", draft="sound").mean == pytest.approx(1 / 16)
    assert findings.at("seen", place="at", reader="residual").mean == pytest.approx(31 / 32)
    assert findings.at("beyond").mean == pytest.approx(15 / 32)
    assert findings.at("builds").mean == pytest.approx(0.75)
    assert findings.at("outdoes").mean == pytest.approx(0.5)
    assert findings.at("costs").mean == pytest.approx(200.0)
    claimed = {finding.comparisons for claim in STUDY.claims for finding in findings.where(claim.finding)}
    assert len(claimed) == 1


def test_arms_that_are_right_by_chance_alike_are_not_distinguishable():
    tables = made_up()
    rng = np.random.default_rng(0)
    tables["samples"]["right"] = rng.integers(0, 2, len(tables["samples"])).astype(float)
    findings = concluded(tables).findings
    for name in ("restart", "warned", "masked", "cleared", "handed", "poisons", "spreads"):
        assert not any(finding.value.differs() for finding in findings.where(name)), name


def test_a_digest_of_the_tasks_stands_beside_the_settings():
    assert inputs(SMALL) == inputs(SMALL) != inputs(MADE_UP)


def test_a_whole_run_resumes_and_reads_both_solutions_alike_before_the_wrong_line(finished: Run):
    before = finished.df("probes")
    before = before[(before["place"] == "before") & (before["reader"] != "hash")]
    assert (before.groupby(["reader", before["sample"] // 2])["right"].mean() == 0.5).all()
    assert set(finished.df()["arm"]) >= {"review", "masked", "recomputed", "failing", "warned", "fresh"}


def test_a_critique_without_code_leaves_the_first_answer_as_it_was():
    tables = made_up()
    silent = tables["samples"]["arm"] == "critique"
    said = tables["samples"].assign(right=tables["samples"]["right"].where(~silent, 0.0))
    said = said.assign(code=said["code"].where(~silent, 0.0))
    concluded_so = concluded({**tables, "samples": said})
    right = {
        draft: concluded_so.findings.at("right", arm="critique", draft=draft).mean for draft in ("planted", "sound")
    }
    assert right == {"planted": 0.0, "sound": 1.0}
    assert all(control.holds for control in concluded_so.controls)
