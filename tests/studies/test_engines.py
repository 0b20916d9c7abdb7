"""The engines study: a whole run of a tiny model in both engines, its files, and what made-up tables decide."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe.studies.engines.collect as collecting
from kvprobe.engines.server import Completion, LlamaServer
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.experiments.work import forget_kept
from kvprobe.inference.model import Model
from kvprobe.models.gguf_header import read_header
from kvprobe.studies.engines import Config
from kvprobe.studies.engines.collect import CLOSED, CONTROL, FULL, HERE, MASKED, NAIVE, PAIRS, RESTART, SHIFTED, visible
from kvprobe.studies.engines.conclude import concluded
from kvprobe.studies.engines.files import in_float32
from kvprobe.studies.engines.study import STUDY
from kvprobe.text.tokens import Tokens
from kvprobe.tidy import chosen
from tests.experiments.made_up import answer_of
from tests.models import llama, tiny_tokenizer
from tests.models.gguf_file import write_gguf
from tests.refusals import refused
from tests.studies.runs import every, whole_run
from tests.tasks.made_up import FOUR_FACTS


@pytest.fixture(scope="module")
def config(roomy: Model, tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = write_gguf(roomy, tmp_path_factory.mktemp("gguf") / "roomy.gguf")
    return Config(kinds=("code",), prompts=2, engines=("exact", "f16"), reply=2, gguf=str(path))


@pytest.fixture(scope="module")
def finished(roomy: Model, config: Config, root: Path) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collecting, "facts", lambda _, each: FOUR_FACTS[:each])
        return whole_run(STUDY, config, roomy, root, [True, True, True])


def test_both_engines_say_the_same_under_every_condition(finished: Run):
    rows = finished.df()
    conditions = {FULL, CONTROL, MASKED, CLOSED, NAIVE, RESTART}
    assert set(rows.groupby("engine")["condition"].agg(frozenset).items()) == {
        (HERE, frozenset(conditions)),
        *((engine, frozenset({*conditions, SHIFTED})) for engine in ("exact", "f16")),
    }
    assert chosen(rows, {"engine": "exact"})["kl"].max() < 1e-9
    assert 1e-9 < chosen(rows, {"engine": "f16"})["kl"].max() < 1e-3
    assert chosen(rows, {"engine": "exact", "condition": SHIFTED})["off"].max() < 1e-5
    pairs: Any = finished.tables()["pairs"].pivot(index=["sample", "pair"], columns="engine", values="kl")
    assert (pairs["exact"] - pairs[HERE]).abs().max() < 1e-5
    assert pairs.xs("bug", level="pair")[HERE].min() > 1e-4


def test_numbers_are_those_of_reading_by_hand(finished: Run, roomy: Model):
    (pair, *_) = collecting.pairs_in_turn(FOUR_FACTS, roomy.tokenizer, 0)
    rows = chosen(finished.df(), {"sample": pair.id, "engine": HERE}).set_index("condition")
    whole = Tokens.of([*visible(pair), *pair.suffix.ids])
    restart = roomy.extend(None, whole, logits=1)[1][0, -1].log_softmax(-1)
    right, wrong = pair.answers
    assert rows.loc[RESTART, "margin"] == pytest.approx(float(restart[right] - restart[wrong]), abs=1e-4)
    masked = roomy.prefill(pair.prompts[0]).mask("fact")
    said = roomy.extend(masked, pair.suffix, logits=1)[1][0, -1].log_softmax(-1)
    pairs = chosen(finished.tables()["pairs"], {"sample": pair.id, "engine": HERE}).set_index("pair")
    kl = float((restart.exp() * (restart - said)).sum())
    assert pairs.loc["price", "kl"] == pytest.approx(kl, abs=1e-4)


def test_a_file_in_float32_holds_the_same_numbers_and_settings(tmp_path: Path):
    model = llama(tokenizer=tiny_tokenizer(), hidden_size=64, intermediate_size=64)
    own = write_gguf(model, tmp_path / "own.gguf", gguf.GGMLQuantizationType.Q8_0)
    before, after = read_header([own]), read_header([in_float32(own, tmp_path / "exact.gguf")])
    assert before.metadata == after.metadata
    assert {stored.kind.name for stored in after.tensors.values()} == {"F32"}
    assert {stored.kind.name for stored in before.tensors.values()} == {"F32", "Q8_0"}
    for name in before.tensors:
        assert torch.equal(before.floats(name), after.floats(name))


CONFIG = Config(engines=("exact", "f16"))


def made_up(beyond: float = 0.02, known: float = 1.0, more: float = 0.05) -> dict[str, pd.DataFrame]:
    """Twenty conversations. Of a hidden turn `known` nats are left; in llama.cpp an edit takes it `beyond` nats away
    from transformers, and KL between conditions is `more` than in transformers."""
    rows: Any = every(
        sample=range(20),
        engine=[HERE, "exact", "f16"],
        condition=[*(FULL, CONTROL, MASKED), CLOSED, SHIFTED, NAIVE, RESTART],
    )
    rows = rows[(rows["engine"] != HERE) | (rows["condition"] != SHIFTED)]
    wave = (rows["sample"] % 5 - 2) * 1e-3
    seen, fresh = rows["condition"].isin([FULL, CONTROL]), rows["condition"] == RESTART
    rounds = rows["engine"] == "f16"
    samples = rows.assign(
        kind="code",
        margin=np.where(seen, 5.0, np.where(fresh, 0.5, 0.5 + known)) + wave * np.where(fresh, 1, 2),
        answered=seen.astype(float),
        kl=np.where(rows["engine"] == HERE, np.nan, np.where(rounds, 0.01 + beyond * ~(seen | fresh) + wave / 9, 1e-9)),
        agrees=np.where(rows["engine"] == HERE, np.nan, 1.0),
        off=np.where(rows["condition"] == SHIFTED, 1e-6, np.nan),
    )
    pairs: Any = every(sample=range(20), engine=[HERE, "exact", "f16"], pair=list(PAIRS))
    pairs = pairs[(pairs["engine"] != HERE) | (pairs["pair"] != "rounding")]
    kl = 0.1 + np.where(pairs["engine"] == "f16", more, 0.0) + (pairs["sample"] % 5 - 2) * 1e-3
    return {"samples": samples, "pairs": pairs.assign(kind="code", kl=kl)}


def example() -> tuple[Config, Conclusion]:
    return CONFIG, concluded(made_up(), CONFIG)


def noise(rng: np.random.Generator) -> Conclusion:
    """Engines and conditions differ by chance alone."""
    tables = made_up(0.0, 0.0, 0.02)
    for name, column, size in (("samples", "margin", 0.5), ("samples", "kl", 0.002), ("pairs", "kl", 0.01)):
        tables[name][column] += size * rng.standard_normal(len(tables[name]))
    return concluded(tables, CONFIG)


def test_a_reply_for_which_a_server_read_an_edited_cache_again_is_refused(
    roomy: Model, config: Config, monkeypatch: pytest.MonkeyPatch
):
    complete = LlamaServer.complete

    def forgetful(server: LlamaServer, ids: Any, n_predict: int = 1, **settings: Any) -> Completion:
        answer = complete(server, ids, n_predict, **settings)
        return replace(answer, reused=3) if n_predict == config.reply else answer

    monkeypatch.setattr(LlamaServer, "complete", forgetful)
    (pair, *_) = collecting.pairs_in_turn(FOUR_FACTS, roomy.tokenizer, 0)
    one = replace(config, engines=("f16",))
    refused(lambda: collecting.measure(roomy, one, (FOUR_FACTS[0], pair)), "what was edited is lost")
    forget_kept()


def test_planted_numbers_are_found(tmp_path: Path):
    config, conclusion = example()
    findings = conclusion.findings
    assert findings.at("known", engine="f16", condition=MASKED).mean == pytest.approx(1.0)
    assert findings.at("carried", engine="f16", condition=SHIFTED).mean == pytest.approx(0.0)
    assert findings.at("beyond", engine="f16", condition=NAIVE).mean == pytest.approx(0.02)
    assert findings.at("gap", engine="f16", pair="price").mean == pytest.approx(0.05)
    said = answer_of(STUDY, config, conclusion, tmp_path)
    assert "with the turn masked it is further from transformers than text that was not edited" in said
    assert "still leans to the hidden fact" in said
    nothing = answer_of(STUDY, config, concluded(made_up(0.0, 0.0, 0.02), config), tmp_path / "nothing")
    assert "it is not shown to be further" in nothing
    assert "is not shown to lean" in nothing


def test_controls_fail_where_engines_differ_or_the_fact_is_not_where_it_was():
    tables = made_up()
    assert [control.holds for control in concluded(tables, CONFIG).controls] == [True, True, True]
    wrong = tables["samples"]
    wrong.loc[(wrong["engine"] == "exact") & (wrong["condition"] == NAIVE), "kl"] = 1e-3
    wrong.loc[(wrong["engine"] == "f16") & (wrong["condition"] == SHIFTED), "off"] = 0.5
    wrong.loc[(wrong["engine"] == "f16") & (wrong["condition"] == CONTROL), "margin"] = 0.0
    assert [control.holds for control in concluded(tables, CONFIG).controls] == [False, False, False]
