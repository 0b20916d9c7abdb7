"""The forgetting study: a whole run of a tiny model, its ways against those of the library, and made-up tables."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.cache.cache import KVCache
from kvprobe.editing import replace_text
from kvprobe.errors import UserError
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.forgetting.use import Answers
from kvprobe.inference.model import Model
from kvprobe.report.document import chat_record
from kvprobe.studies.forgetting import KINDS, Config, Kind, run
from kvprobe.studies.forgetting.cases import TURN, cases, draw
from kvprobe.studies.forgetting.collect import _asked, _decided, _used, holds, reference, ways
from kvprobe.studies.forgetting.conclude import concluded
from kvprobe.studies.forgetting.study import STUDY
from kvprobe.studies.forgetting.ways import (
    ALL,
    CLEAN,
    CLOSED,
    ERASED,
    ERRATUM,
    EVICT,
    INSTEAD,
    MASK,
    MATCHED,
    NOTHING,
    OTHER,
    PLACED,
    RESTART,
    STEERED,
    ZERO,
    ForgettingSession,
    flops,
    reread,
)
from kvprobe.tasks.facts import conversation
from kvprobe.tidy import chosen
from tests.experiments.made_up import answer_of
from tests.studies.runs import every
from tests.tasks.made_up import FOUR_FACTS

SMALL = Config(
    kinds=("code",), conversations=2, secrets=20, asked=3, windows=(4,), fitted=(2,), erased=(2,), steps=1, reply=1
)
MODEL = "wordy"
HOLD = [True, False, True, False]


def test_what_is_read_anew_leaves_nothing_and_an_untouched_cache_leaves_all(finished: Run):
    rows: Any = finished.df()
    assert set(rows["way"]) == set(ways(SMALL))
    clean = rows[rows["way"].isin(CLEAN)]
    assert (clean[["differs", "spread", "bits", "use"]] == 0).all(axis=None)
    for measured, by_chance in {"read": 1 / 10, "whole": 1e-5, "tried": 1 / 20}.items():
        assert clean[measured].to_numpy() == pytest.approx(by_chance), "five digits, twenty tried"
    full: Any = chosen(rows, {"way": NOTHING})
    assert full["read"].min() > 0.25, "chance is 0.1, and twenty secrets are few"
    assert full["tried"].min() == 1.0
    assert rows["bits"].max() <= 1.0, "no more than is there"
    assert (rows[~rows["way"].isin(CLEAN)]["differs"] == 1).all()
    assert chosen(rows, {"way": CLEAN})["kl"].max() < 1e-6, "each is its own reference, at the same positions"
    assert chosen(rows, {"way": PLACED})["restarted"].min() > 1e-6
    assert chosen(rows, {"way": RESTART})["restarted"].max() < 1e-6


def test_tokens_read_again_are_counted(finished: Run):
    tokens: Any = finished.df().pivot(index="sample", columns="way", values="tokens")
    assert (tokens[[NOTHING, STEERED, ZERO, MASK, EVICT, CLOSED]] == 0).all(axis=None)
    assert (tokens[f"{OTHER} 4"] - tokens[OTHER] == 4).all()
    assert (tokens[RESTART] == tokens[PLACED]).all()
    assert (tokens[ALL] > tokens[RESTART]).all()
    assert (tokens[ERRATUM] > 10).all()


@pytest.fixture(scope="module")
def session(wordy: Model) -> ForgettingSession:
    (case, *_) = cases("code", 1, wordy.tokenizer, 0)
    return ForgettingSession.of(wordy, draw(case, 5, 2, wordy.tokenizer, np.random.default_rng(0)))


@pytest.mark.parametrize("slots", [0, 4, "all"])
def test_other_text_for_many_secrets_is_that_of_each(session: ForgettingSession, slots: Any):
    way = OTHER if slots == 0 else f"{OTHER} {slots}"
    many = session.after(way)
    row = 0 if many.batch == 1 else 3
    one = replace_text(session.model, session.full.rows([3]), TURN, INSTEAD, window=slots)
    assert torch.equal(many.rows([row]).ledger.positions, one.ledger.positions)
    for mine, its in zip(
        session.model.as_seen(many.rows([row])).tensors, session.model.as_seen(one).tensors, strict=True
    ):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-5)
    assert reread(session, way, one)[0] == one.slots - len(session.drawn.tokens[0]) + _forgotten(session, slots)


def _forgotten(session: ForgettingSession, slots: Any) -> int:
    """The slots of the old text, and those after it that are read again."""
    (text,) = session.drawn.tokens[0].text_runs(TURN)
    return len(text) + (session.rest if slots == "all" else slots)


@pytest.mark.parametrize("slots", [0, 3])
def test_a_secret_in_the_place_of_another_is_read_with_its_window_and_the_rest_is_the_others(
    session: ForgettingSession, slots: int
):
    edited, full, former = session.edited(slots), session.full, session.former
    assert torch.equal(edited.ledger.tokens, full.ledger.tokens)
    assert torch.equal(edited.ledger.positions, full.ledger.positions)
    differ = (full.ledger.tokens != full.ledger.tokens[:1]).any(0).nonzero()[:, 0]
    clean = int(differ[-1]) + 1 + slots
    for mine, new, old in zip(edited.tensors, full.tensors, former.tensors, strict=True):
        assert torch.equal(mine[:, :, :clean], new[:, :, :clean])
        assert torch.equal(mine[:, :, clean:], old[:, :, clean:])
    assert not torch.equal(full.tensors[-1][:, :, clean:], former.tensors[-1][:, :, clean:]), "V of the last layer"
    (first, *_), rolled = full.ledger.tokens, former.ledger.tokens
    assert torch.equal(rolled[1], first)


def test_a_decision_is_held_against_the_secret_read_anew(session: ForgettingSession):
    asked = session.some(session.drawn.asked)
    decided = _decided(asked, [3, 512])
    assert set(decided) == {NOTHING, OTHER, f"{OTHER} 3", f"{OTHER} 512"}
    assert decided[f"{OTHER} 512"] == 1.0, "all slots are read again"
    own = _asked(session.model, asked.full, asked.drawn).log_probs.argmax(1)
    assert decided[NOTHING] == float((own == own.roll(1)).double().mean()), "the answers of the secrets before"


def test_a_restart_from_the_kept_prefix_is_one_from_nothing(session: ForgettingSession):
    model, (words, *_) = session.model, session.drawn.secrets
    fresh = model.prefill(session.drawn.case.chat(words).without(TURN, mode="contiguous"))
    for mine, its in zip(session.after(RESTART).tensors, fresh.tensors, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-5)


def test_one_cache_for_all_secrets_is_used_as_a_copy_for_each(
    session: ForgettingSession, monkeypatch: pytest.MonkeyPatch
):
    """After a restart, where a model that says one of two secrets says the secret in half of the cases."""
    said = torch.tensor([[False, True]])

    def answered(model: Model, caches: Sequence[KVCache], *asked: object) -> Answers:
        return Answers(torch.tensor([[-2.0, -1.0]]).expand(len(caches), -1), said.expand(len(caches), -1))

    monkeypatch.setattr("kvprobe.studies.forgetting.collect.answers", answered)
    one = session.after(RESTART)
    assert one.batch == 1
    used = _used(session.model, one, session.drawn)
    assert used == _used(session.model, one.fork(len(session.drawn.secrets)), session.drawn)
    assert used["said"] == 0.5


def test_operations_are_those_of_the_model(session: ForgettingSession):
    shape = session.model.geometry
    one, two = (flops(session.model, tokens, 100) for tokens in (10, 20))
    assert two - 2 * one == pytest.approx(4 * shape.n_layers * shape.n_heads * shape.d_head * 100)
    weights = sum(p.numel() for name, p in session.model.lanes.plain.named_parameters() if "layers" in name)
    assert one > 20 * weights


@pytest.mark.parametrize("way", [way for way in ways(SMALL) if not way.startswith(ERASED)])
def test_a_way_is_held_against_a_restart_at_its_own_positions(session: ForgettingSession, way: str):
    one = session.some([0])
    cache, restart = one.after(way), one.after(reference(way))
    if way == ERRATUM:
        cache = cache.rewind(slots=session.full.slots)
    assert int(cache.ledger.following[0]) == int(restart.ledger.following[0])
    after = len(session.drawn.tokens[0]) - session.turn.stop
    assert torch.equal(cache.ledger.positions[:, -after:], restart.ledger.positions[:, -after:])


@pytest.mark.parametrize("way", [ERRATUM, f"{MATCHED} 2", f"{ERASED} 2"])
def test_a_way_that_adds_slots_leaves_the_others_to_the_bit(session: ForgettingSession, way: str):
    some = session.some([1, 3])
    other = holds(way)
    assert other is not None
    base, cache = some.after(other), some.after(way)
    old = ~cache.ledger.fitted
    old[:, base.slots + int(cache.ledger.fitted[0].sum()) :] = False
    for mine, its in zip(cache.take(*cache.ledger.order(old)).tensors, base.tensors, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("kind", KINDS)
def test_secrets_stand_in_the_message_alone_and_move_nothing(wordy: Model, kind: Kind):
    (case,) = cases(kind, 1, wordy.tokenizer, 0)
    drawn = draw(case, 12, 4, wordy.tokenizer, np.random.default_rng(1))
    assert len({len(tokens) for tokens in drawn.tokens}) == 1
    assert len({case.chat(words).without(TURN).tokens(wordy.tokenizer).ids for words in drawn.secrets[:4]}) == 1
    assert case.keeps(drawn.secrets)
    assert len({tokens.ids for tokens in drawn.tokens}) == 12
    assert drawn.labels.shape == (len(case.places), 12)
    assert len({case.answer(drawn.secrets[row]) for row in drawn.asked}) == 4
    assert len(drawn.tokens[0].text_runs(TURN)) == 1


def test_chance_counts_only_secrets_of_as_many_tokens(wordy: Model):
    """Under SmolLM2's tokenizer 224 of 512 instructions take as many tokens; 1, 2 and 4 values of the places do not."""
    case, rng = cases("instruction", 3, wordy.tokenizer, 0)[2], np.random.default_rng(0)
    drawn = draw(case, 60, 2, wordy.tokenizer, rng)
    assert drawn.possible == 224
    assert drawn.chance == pytest.approx((1 / 8 + 1 / 7 + 1 / 4) / 3)
    with pytest.raises(UserError, match=r"only 224 are alike .* 225 are wanted; set secrets"):
        draw(case, 225, 2, wordy.tokenizer, rng)


def test_secrets_that_lack_are_said_before_anything_is_read(wordy: Model, tmp_path: Path):
    config = Config(kinds=("code", "name"), conversations=2, secrets=101)
    with pytest.raises(UserError, match=r"'name-.*' only 100 are alike"):
        run(config, tmp_path, model=wordy)


CONFIG = Config()


def made_up(read: float = 0.6, use: float = 2.0, more: float = 0.0) -> pd.DataFrame:
    """Twenty conversations. Behind a mask `read` of the bits are left and `use` nats of 10; other text `more`."""
    rows: Any = every(sample=range(20), way=list(ways(CONFIG)))
    clean, full = rows["way"].isin(CLEAN), rows["way"] == NOTHING
    wave = (rows["sample"] % 5 - 2) * 0.01
    bits = np.where(clean, 0.0, np.where(full, 1.0, read + wave + more * rows["way"].str.startswith(OTHER)))
    anew = rows["way"].isin([ALL, PLACED, RESTART, ERRATUM])
    return rows.assign(
        kind=np.array(["code", "name", "instruction", "steps"])[rows["sample"] % 4],
        differs=np.where(clean, 0.0, 1.0),
        spread=np.where(clean, 0.0, 0.5),
        read=np.clip(bits, 0.1, 1.0),
        chance=0.1,
        chance_whole=1e-5,
        chance_tried=1 / 64,
        bits=bits,
        whole=np.clip(bits, 0.0, 1.0) ** 3,
        tried=np.where(clean, 0.0, 1.0),
        use=np.where(clean, 0.0, np.where(full, 10.0, use) + 20 * wave),
        said=np.where(full, 1.0, 0.0),
        tokens=np.where(anew, 60, np.where(rows["way"].str.startswith(OTHER), 20, 0)),
        flops=1e9 * anew,
        time=0.1 + anew,
        kl=0.02 + wave,
        same=0.9,
        cosine=0.99,
        restarted=0.025 + wave,
        moved=0.03 + wave,
        apart=1e-7,
        kept=1.0,
        decided=np.where(full, 0.1, np.where(rows["way"].str.startswith(OTHER) & ~clean, 0.9, np.nan)),
    )


def example() -> tuple[Config, Conclusion]:
    return CONFIG, concluded(made_up(), CONFIG, _chat(), "Which?")


def _chat() -> Any:
    return chat_record(conversation(FOUR_FACTS[0], "b"), masked=("fact",))


def noise(rng: np.random.Generator) -> Conclusion:
    """Ways differ, and the model leans, by chance alone."""
    table = made_up(use=0.0)
    for column, size in (("bits", 0.1), ("use", 0.5)):
        table[column] += size * rng.standard_normal(len(table))
    return concluded(table, CONFIG, _chat(), "Which?")


def test_planted_numbers_are_found(tmp_path: Path):
    config, conclusion = example()
    findings = conclusion.findings
    assert findings.at("bits", way=MASK).mean == pytest.approx(0.6)
    assert findings.at("used", way=EVICT).mean == pytest.approx(0.2, abs=0.005)
    assert findings.at("cost", way=OTHER).mean == pytest.approx(1 / 3)
    assert findings.at("decided", way=OTHER).mean == pytest.approx(0.9)
    assert findings.values("decided", "way") == [NOTHING, *(way for way in ways(config) if way.startswith(OTHER))][:-1]
    said = answer_of(STUDY, config, conclusion, tmp_path)
    assert "Evicted: the model still leans to the secret" in said
    assert "It is not shown that more or less can be read" in said
    less = concluded(made_up(more=-0.3, use=0.0), CONFIG, _chat(), "Which?")
    said = answer_of(STUDY, config, less, tmp_path / "less")
    assert "less can be read than from behind a mask" in said.lower()
    assert "is not shown to lean" in said


def test_controls_fail_where_a_restart_differs_or_nothing_is_read():
    assert [control.holds for control in example()[1].controls] == [True] * 4
    table = made_up()
    table.loc[table["way"] == RESTART, "differs"] = 1.0
    table.loc[table["way"] == NOTHING, "read"] = 0.2
    table.loc[table["way"] == NOTHING, "said"] = 0.0
    table["apart"] = 0.1
    assert [control.holds for control in concluded(table, CONFIG, _chat(), "").controls] == [False] * 4
