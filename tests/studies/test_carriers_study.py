"""The carriers study on a tiny model: what is swapped is what its name says, and the answer follows the numbers."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.faults.scope import EVERY_LAYER
from kvprobe.inference.model import Model
from kvprobe.patching import Cell
from kvprobe.studies.carriers import Config
from kvprobe.studies.carriers import collect as collecting
from kvprobe.studies.carriers.collect import CODES, DIRECTIONS, QUESTIONS, ask
from kvprobe.studies.carriers.conclude import BOTH, conclude
from kvprobe.studies.carriers.groups import BEFORE, GROUPS, PARTS, SELF, cells, code_cells, groups, token_cells
from kvprobe.studies.carriers.study import STUDY
from kvprobe.tasks.compaction import Compaction, compacted_conversation
from kvprobe.tidy import chosen
from tests.experiments.made_up import answer_of
from tests.models import any_model
from tests.tasks.made_up import short_contexts

SMALL = Config(contexts=2, bands=2)
MODEL, HOLD, UNDRAWN = "roomy", [True, True, True], ["codes"]
PAIR = ("48213", "90577")
CONTEXTS = short_contexts(3)
FOLLOWING = tuple(
    Compaction(context.id, "When?", "a ride", "a walk", "So?", "so", "Who?", "And us?", "us, too.", "So.", "So, so.")
    for context in CONTEXTS
)


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collecting, "contexts", lambda: CONTEXTS)
        patch.setattr(collecting, "compactions", lambda: FOLLOWING)
        patch.setattr(collecting, "draw_codes", lambda count, *_: (list(PAIR) * count)[:count])
        yield


@pytest.fixture(scope="module")
def read(finished: Run) -> pd.DataFrame:
    """The first conversation, whose code is the first of `PAIR`."""
    return finished.df().query("context == 0")


def slots_of(model: Model) -> dict[str, tuple[int, ...]]:
    chat = compacted_conversation(CONTEXTS[0], FOLLOWING[0], PAIR[0]).without("T2")
    return groups(chat.tokens(model.tokenizer))


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_swap_is_what_patching_by_hand_and_reading_on_gives(
    roomy: Model, read: pd.DataFrame, question: str, direction: str
):
    chat = compacted_conversation(CONTEXTS[0], FOLLOWING[0], PAIR[0])
    whole, gone = chat.tokens(roomy.tokenizer), chat.without("T2").tokens(roomy.tokenizer)
    masked = roomy.prefill(whole[: whole.span("ask").start]).mask("T2")
    recomputed, retained = roomy.prefill(gone[: gone.span("ask").start]), masked.evict("T2")
    asked = ask(roomy, chat, CONTEXTS[0], FOLLOWING[0], PAIR[0], question)

    def likely(cache: KVCache) -> float:
        logits = roomy.extend(cache, asked.suffix, logits=len(asked.answer))[1][0].log_softmax(-1)
        return float(logits.gather(1, torch.tensor(asked.answer)[:, None]).sum())

    base, donor = (recomputed, masked) if direction == "restoring" else (masked, recomputed)
    slots = torch.zeros(1, recomputed.slots, dtype=torch.bool)
    slots[0, list(slots_of(roomy)["summary"])] = True
    ends = (recomputed, retained) if direction == "restoring" else (retained, recomputed)
    patched = ends[0].patch(ends[1], slots=slots, part="V")
    where = {"question": question, "direction": direction, "group": "summary", "part": "V", "band": EVERY_LAYER}
    row = chosen(read, where).set_index("metric").loc["logprob"]
    assert [row["base"], row["donor"], row["value"]] == pytest.approx([*map(likely, (base, donor, patched))], abs=1e-3)
    assert row["base"] != pytest.approx(row["donor"], abs=1e-2)


def test_two_codes_change_nothing_before_the_turn_and_reach_what_follows(read: pd.DataFrame):
    rows = chosen(read, {"question": CODES}).set_index("group")
    assert set(rows.index) == {*GROUPS, BEFORE}
    assert abs(rows.loc[BEFORE, "effect"]) < 1e-4 < abs(rows.loc["all after", "way"])
    assert rows.loc["all after", "effect"] == pytest.approx(rows.loc["all after", "way"], abs=1e-4)


def test_a_run_holds_every_number_and_figure(finished: Run, roomy: Model, read: pd.DataFrame):
    assert sorted(chosen(read, {"group": "token", "metric": "kl"})["slot"]) == list(slots_of(roomy)["all after"])
    conclusion = Conclusion.of(finished.metrics)
    assert len(conclusion.findings.where("share")) == 3 * len(DIRECTIONS) * 2 * len(GROUPS) * len(PARTS)
    assert len(conclusion.findings.where("band_share")) == SMALL.bands * len(DIRECTIONS) * (
        len(PARTS) + len(GROUPS) - 3
    )
    assert conclusion.findings.at("distance", question=BOTH).mean > 0.01
    assert len(conclusion.facts["tokens"]) == len(conclusion.findings.where("token_share")) > 0


Labels = dict[str, Any]
MADE_UP = Config(contexts=10)
FIRST = {"question": QUESTIONS[0], "direction": DIRECTIONS[0]}
LAYERS = {"0–1": (0, 1), "2–3": (2, 3), "4": (4,), EVERY_LAYER: (0, 1, 2, 3, 4)}
SLOTS = {group: tuple(range(3, 5 + place)) for place, group in enumerate((*GROUPS, BEFORE))}
PLANTED = {"summary text": 0.7, "summary delimiters": 0.1, "summary": 0.8, "later turns": 0.2, "all after": 1.0}
BY_PART, BY_BAND = {"K": 0.25, "V": 0.75, "KV": 1.0}, {"0–1": 0.1, "2–3": 0.9, "4": 0.2, EVERY_LAYER: 1.0}


def planted(labels: Labels) -> float:
    """V has three times what K has, and one of three bands has nearly all."""
    return PLANTED.get(labels["group"], 0.0) * BY_PART[labels["part"]] * BY_BAND[labels["band"]]


def made_up(
    share: Callable[[Labels], float] = planted,
    code: Callable[[int], float] = lambda _: 2.0,
    kl: Callable[[int], float] = lambda context: 1 + context / 10,
    known_code: float = 5.0,
    config: Config = MADE_UP,
) -> pd.DataFrame:
    """Swaps have these shares, and a code still moves so much of ten logits; the model mistakes the last one."""
    rows = []
    for context in range(config.contexts):
        known = {"context": context, "right": context > 0, "apart": 0.0, "slot": -1, "token": ""}
        for question, direction in product(QUESTIONS, DIRECTIONS):
            place = {"question": question, "direction": direction}
            tokens = token_cells((20, 21), LAYERS) if context == 0 and place == FIRST else []
            for metric, way in (("kl", -kl(context)), ("logprob", 3.0)):
                common = known | place | {"metric": metric, "full": 1.0, "full_other": np.nan, "way": way}
                rows += [row(common, cell, share) for cell in [*cells(SLOTS, LAYERS), *tokens]]
        common = known | {"question": CODES, "direction": CODES, "metric": "logit_diff", "way": -code(context)}
        common |= {"full": known_code if context < config.contexts - 1 else -1.0, "full_other": -5.0}
        rows += [row(common, cell, planted) for cell in code_cells(SLOTS, LAYERS)]
    return pd.DataFrame(rows)


def row(common: Labels, cell: Cell, share: Callable[[Labels], float]) -> Labels:
    labels = {**common, **cell.labels, "part": cell.part, "slots": len(cell.slots)}
    effect = common["way"] * share(labels)
    return labels | {"base": -common["way"], "donor": 0.0, "effect": effect, "value": effect - common["way"]}


def example() -> tuple[Config, Conclusion]:
    return MADE_UP, conclude(made_up(), MADE_UP, any_model())


def noise(rng: np.random.Generator) -> Conclusion:
    """All groups, parts and bands carry the same on average, and the code nothing; conversations differ."""
    distances = rng.gamma(2.0, size=MADE_UP.contexts)
    table = made_up(lambda _: float(rng.normal(0.5, 0.5)), lambda _: float(rng.normal()), lambda row: distances[row])
    return conclude(table, MADE_UP, any_model())


def test_planted_shares_sizes_bands_parts_and_codes_are_found():
    findings = example()[1].findings
    for group, share in PLANTED.items():
        shares = [finding.value.mean for finding in findings.where("share", group=group, part="KV")]
        assert shares == pytest.approx([share] * 12)
    summary = {"group": "summary", "part": "KV"}
    for name, keys, value in (
        ("share", {**FIRST, "metric": "kl", "group": "all after", "part": "K"}, 0.25),
        ("effect", {**FIRST, "metric": "kl", **summary}, -0.8 * 1.45),
        ("band_share", {"direction": "removing", "group": "summary text", "part": "KV", "band": "2–3"}, 0.7 * 0.9),
        ("size", {"group": "later turns"}, len(SLOTS["later turns"])),
        ("distance", {"question": BOTH}, 1.45),
        ("heaviest", {"question": "hidden"}, 1.9 / 14.5),
        ("foretold", {"question": "summary"}, 0.9),
        ("able", {}, 9),
        ("code_in_view", {}, 10),
        ("code_masked", {}, 2),
        ("code_effect", {**summary, "direction": CODES}, 1.6),
        ("code_share", {"group": "summary"}, 0.16),
    ):
        assert findings.at(name, **keys).mean == pytest.approx(value), name
    gaps = {
        (finding.keys["first"], round(finding.value.mean, 9), finding.comparisons) for finding in findings.where("gap")
    }
    of_summary, of_parts = {("summary", 0.6, 5), ("summary", 0.6, 4)}, {("V", 0.5, 5), ("V", 0.5, 2)}
    assert gaps == of_summary | of_parts | {("summary text", 0.6, 6)}


def test_a_band_leads_only_if_it_is_significantly_ahead_of_every_other():
    uneven = made_up(lambda row: planted(row) + (row["band"] == "0–1") * 2 * (-1) ** row["context"])
    for table, nearest, leads in ((made_up(), "4", True), (uneven, "0–1", False)):
        findings = conclude(table, MADE_UP, any_model()).findings
        ahead = [(finding.keys["other"], finding.value.above()) for finding in findings.where("lead")]
        assert ahead == [(nearest, leads)] * 2
        assert findings.at("ahead", direction="removing", band="2–3", other="4").ends == pytest.approx((0.7, 0.7))


@pytest.mark.parametrize(("group", "failing"), [(BEFORE, 0), (SELF, 1), ("all after", 2)])
def test_a_swap_that_does_what_it_must_not_fails_its_control(group: str, failing: int):
    table = made_up()
    table.loc[(table["group"] == group) & (table["context"] == 1), ["effect", "value"]] += 0.1
    held = [control.holds for control in conclude(table, MADE_UP, any_model()).controls]
    assert held == [place != failing for place in range(3)]
    apart = conclude(made_up().assign(apart=1e-3), MADE_UP, any_model()).controls
    assert [control.holds for control in apart] == [False, True, True]


def times(weights: Labels, key: str, **where: str) -> Any:
    """What is planted, times a weight by one label, where others are these."""
    return lambda row: planted(row) * (weights.get(row[key], 1.0) if where.items() <= row.items() else 1.0)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            {},
            "restore 80.0 % (no spread) of what distinguishes one that has. This is significantly more than",
        ),
        ({}, "2–3 with 90.0 % (no spread), significantly more than every other band; V carries significantly more"),
        ({"share": times({"later turns": 5.0}, "group")}, "that has. This is significantly less than later turns"),
        ({"share": times({"later turns": 4.0}, "group", direction="removing")}, "remove not detectably more or less"),
        ({"share": times({"0–1": 9.0}, "band")}, "not detectably more than every other band"),
        ({"share": times({"K": 9.0}, "part")}, "V carries significantly less than K"),
        ({"share": times({"K": 3.0}, "part")}, "V carries not detectably more or less than K"),
        ({"share": times({"K": 9.0}, "part", question="hidden")}, "do not agree on whether V carries more than K"),
        ({"share": times({"K": 3.0}, "part", direction="removing")}, "do not agree on whether V carries more than K"),
        ({"kl": lambda _: 1e-5}, "hardly anything to carry"),
        ({"code": lambda context: 1 + (-1) ** context / 10}, "hold something of the code itself"),
        ({"code": lambda context: -1 + (-1) ** context / 10}, "away from the code"),
        ({"code": lambda context: (-1) ** context / 10}, "the code itself was not detected"),
        ({"known_code": -1.0}, "cannot be said: with everything in view the model distinguishes two codes in 0 of 10"),
    ],
)
def test_the_answer_follows_the_intervals(table: Any, expected: str, tmp_path: Path):
    assert expected in answer_of(STUDY, MADE_UP, conclude(made_up(**table), MADE_UP, any_model()), tmp_path)


def test_few_conversations_are_warned_of_and_nothing_is_claimed():
    few = replace(MADE_UP, contexts=6)
    conclusion = conclude(made_up(config=few), few, any_model())
    assert "6 conversations are too few" in conclusion.warnings[0]
    claimed = [finding for claim in STUDY.claims for finding in conclusion.findings.where(claim.finding)]
    assert not [finding for finding in claimed if finding.value.differs()]
