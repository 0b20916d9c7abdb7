"""The leakage study: what is shared must equal what is read one by one, a real model knows its secrets, and what
made-up tables decide."""

from collections.abc import Iterator
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from kvprobe.experiments.page import answer
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.inference.forced import forced_logits
from kvprobe.inference.model import Model
from kvprobe.probing.features import read_outs
from kvprobe.probing.splits import SPLITS
from kvprobe.report.findings import Findings
from kvprobe.stats import FEWEST
from kvprobe.studies import leakage
from kvprobe.studies.leakage import Config, reading
from kvprobe.studies.leakage.collect import ARMS, CHANGED
from kvprobe.studies.leakage.conclude import conclude
from kvprobe.studies.leakage.reading import FAMILIES, USE_ARMS, read_context
from kvprobe.studies.leakage.study import READINGS, STUDY
from kvprobe.tasks.passcode import contexts, conversation
from kvprobe.tasks.secrets import secret
from tests.experiments.made_up import answer_of
from tests.models import any_model
from tests.studies.runs import close, every, whole_run

SMALL = Config(contexts=8, samples=48, folds=3, permutations=3, batch=10, untrained=True)
CODES = ("48213", "90577", "13662")


@pytest.fixture(scope="module")
def without_residual() -> Iterator[None]:
    """Runs of K and V alone: probes of the residual stream take most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "FAMILIES", ("k", "v"))
        yield


@pytest.fixture(scope="module")
def finished(wordy: Model, without_residual: None, root: Path) -> Run:
    return whole_run(STUDY, SMALL, wordy, root, [True])


@pytest.fixture(scope="module")
def read(wordy: Model) -> dict[str, torch.Tensor]:
    return read_context(wordy, contexts()[0], CODES, batch=2)


@pytest.mark.parametrize("row", range(len(CODES)))
def test_shared_prefixes_change_nothing(wordy: Model, read: dict[str, torch.Tensor], row: int):
    chat = conversation(contexts()[0], CODES[row])
    tokens, restarted = chat.tokens(wordy.tokenizer), chat.without("T1", "T2").tokens(wordy.tokenizer)
    third, answer = tokens.span("T3"), tokens.part("answer")
    after_code = range(tokens.part("code").stop, tokens.span("T2").stop)
    before = tokens[: third.start]
    first = wordy.capture(before, FAMILIES, segments=["summary2"], keep_cache=True)
    assert first.cache is not None
    asked, hidden = tokens[third.start : answer.start], first.cache.mask("T1", "T2")
    masked = wordy.capture(asked, FAMILIES, past=hidden, keep_cache=True)
    again = restarted[: restarted.part("answer").start]
    by_arm = {
        "before": (0, wordy.capture(before, FAMILIES, segments=["summary1"])),
        "hidden": (row, wordy.capture(before, FAMILIES, slots=after_code)),
        "direct": (row, first),
        "masked": (row, masked),
        "direct restart": (0, wordy.capture(again, FAMILIES, segments=["summary2"])),
        "restart": (0, wordy.capture(again, FAMILIES, segments=["T3"], keep_cache=True)),
    }
    for arm, (place, captured) in by_arm.items():
        for family in FAMILIES:
            close(read[f"{arm}.{family}"][place], read_outs(captured.stack(family))[0])
    full = wordy.extend(first.cache, asked)
    for arm, (cache, logits) in {"full": full, "retained": (masked.cache, masked.logits)}.items():
        assert cache is not None
        scores = forced_logits(wordy, cache, logits, [tokens[answer]])[0].log_softmax(-1)
        expected = scores[torch.arange(5), torch.tensor(tokens.ids[answer])]
        close(read["logprob"][row, USE_ARMS.index(arm)], expected)


@pytest.mark.parametrize(("kind", "secrets"), [("code", CODES), ("topic", ("piano", "soccer", "bread"))])
def test_a_real_model_gives_the_secret_in_view_and_not_after_a_restart(
    smol: Model, kind: str, secrets: tuple[str, ...]
):
    read = read_context(smol, secret(kind).contexts[0], secrets, batch=3)
    margin = dict(zip(USE_ARMS, read["margin"].sum(2).mean(0).tolist(), strict=True))
    assert margin["full"] > 1 > margin["restart"]
    assert read["kl"][:, 0].max() < 1e-5
    assert read["kl"][:, 1:].min() > 0.1
    right = dict(zip(USE_ARMS, read["correct"].double().mean((0, 2)).tolist(), strict=True))
    assert right["full"] > 0.6 > 0.4 > right["restart"]


def test_a_run_holds_every_table_number_and_figure(finished: Run, wordy: Model):
    sites = wordy.geometry.n_layers * 2 * 2
    assert len(finished.df("probes")) == sites * (len(ARMS) + len(CHANGED)) * len(SPLITS)
    assert set(finished.df()["condition"]) == {"full", "retained", "restart", *ARMS, *CHANGED.values()}
    assert len(list((finished.path / "probes").glob("*/card.yaml"))) == 5
    assert (finished.path / "report.html").read_text().count('data-component="HeatMap"') == 2
    concluded = Conclusion.of(finished.metrics)
    findings, readings = concluded.findings, finished.df("readings")
    assert findings.at("reach", layers="last").mean > 1e-4
    assert set(findings.values("accuracy", "reading", arm="masked")) == set(READINGS)
    for finding in findings.where("leak"):
        assert finding.value.mean == pytest.approx(findings.at("lead", reading="restart", **finding.keys).mean)
    direct = readings[(readings["arm"] == "direct") & (readings["split"] == "random")].set_index("reading")["accuracy"]
    lead = findings.at("lead", arm="direct", split="random", reading="restart").mean
    assert lead == pytest.approx(direct["retained"] - direct["restart"])


def test_one_context_says_that_it_does_not_generalise(
    wordy: Model, without_residual: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("kvprobe.experiments.running.draw", lambda *_: None)
    run = leakage.run(Config(secret="topic", contexts=1, samples=30, folds=3, permutations=1), tmp_path, model=wordy)
    conclusion = Conclusion.of(run.metrics)
    assert conclusion.findings.at("leak", arm="masked", split="random").clusters == 30
    assert "does not say" in conclusion.warnings[0]
    assert "of the topics" in answer(STUDY, run)


PROBED = ("masked", "direct", "hidden", *CHANGED.values())
WIDE = {"low": 0.2, "high": 0.4, "smallest": 0.1, "largest": 0.5}


def tables(
    leak: float,
    inside: float = 0.0,
    use: float = 0.0,
    *,
    changed: float | None = None,
    p: float = 0.02,
    count: int = FEWEST,
    full: float = 0.95,
    noise: np.random.Generator | None = None,
) -> dict[str, pd.DataFrame]:
    """What probes read above the floor, and what masking adds to the margin, give or take 0.01 (or noise).

    Args:
        inside: in the paired split.
        changed: less the restart; as much as `leak` by default.
        p: of labels permuted within conversations.
        count: of conversations.
        full: the share that is read right in full view.
    """
    headline, splits = ("random", ("random",)) if count == 1 else ("leave-context-out", SPLITS)
    leads = {("masked", headline): leak, ("masked", "paired"): inside}
    leads[CHANGED["masked"], headline] = leak if changed is None else changed
    cases, arms = range(40 // count * count), (*PROBED, "before", "restart")
    margins = {"full": 5.0, "retained": use, "restart": 0.0}
    used = every(measure=["use"], sample=cases, condition=list(margins)).assign(token_accuracy=0.5)
    used["margin"], used["kl_from_full"] = used["condition"].map(margins), 0.5 + 0.1 * (used["condition"] == "restart")
    read = every(measure=["probe"], sample=cases, condition=arms, split=splits, place=("1", "2"))
    lead = [leads.get(site, 0.0) for site in zip(read["condition"], read["split"], strict=True)]
    read = read.assign(right=0.1 + np.array(lead), floor=0.1)
    for rows, column, scale in ((used, "margin", 1.0), (read, "right", 0.1)):
        own = rows["sample"] if count == 1 else rows["sample"] // (40 // count)
        rows[column] += noise.normal(size=len(rows)) * scale if noise else 0.01 * (-1) ** own
    used.loc[used["condition"] == "restart", "margin"] = 0.0
    samples = pd.concat([used.assign(logprob=used["margin"] - 9), read], ignore_index=True)
    probes = every(arm=arms, split=splits, family=FAMILIES, read=("mean", "last"), layer=(0, 1))
    probes = probes.assign(
        accuracy=0.3, **WIDE, p_family=np.where(probes["arm"].isin(("before", "hidden", "restart")), nan, p)
    )
    ends = {f"{name}_{end}": value for name in ("accuracy", "bits", "lead") for end, value in WIDE.items()}
    readings = every(arm=PROBED, split=splits, reading=list(READINGS))
    at = every(arm=PROBED, split=splits)
    return {
        "samples": samples.assign(context=samples["sample"] // (40 // count), secret="4-8"),
        "probes": probes,
        "readings": readings.assign(
            accuracy=np.where(readings["arm"] == "hidden", full, 0.3), bits=0.3, lead=0.3, **ends
        ),
        "codelength": at.assign(bits=3.0, context_bits=3.3, uniform_bits=3.4),
        "sparse": at.merge(every(k=(1, 8)), "cross").assign(accuracy=0.3, low=0.2, high=0.4, random=0.1),
        "picks": at.merge(every(fold=(0, 1)), "cross").assign(family="v", layer=1, read="mean"),
        "reach": pd.DataFrame({"family": "k", "layer": [0, 1, 2], "variation": [0.0, 0.0, 0.1]}),
    }


def numbers(made_up: Any) -> tuple[Config, Conclusion]:
    config = Config(contexts=made_up["samples"]["context"].nunique(), samples=len(made_up["samples"]))
    return config, conclude(made_up, config, any_model())


def example() -> tuple[Config, Conclusion]:
    return numbers(tables(0.2, 0.2, 0.5))


def noise(rng: np.random.Generator) -> Conclusion:
    """No probe reads more than the floor, and masking adds nothing to the margin."""
    return numbers(tables(0.0, count=20, noise=rng))[1]


def test_claims_hold_together_and_numbers_are_those_that_were_put_in():
    findings: Findings = example()[1].findings
    expected = {("masked", "leave-context-out"), (CHANGED["masked"], "leave-context-out"), ("masked", "paired")}
    assert {(finding.keys["arm"], finding.keys["split"]) for finding in findings.where("leak")} == expected
    for claimed, mean in ((findings.finding("use"), 0.5), *((finding, 0.2) for finding in findings.where("leak"))):
        assert claimed.comparisons == 4
        assert claimed.value.mean == pytest.approx(mean)
    assert findings.at("by_place", place="2").mean == pytest.approx(0.3)
    assert findings.at("gained", measure="kl_from_full").mean == pytest.approx(-0.1)


LEAKS, NONE, USES = "Information leaks:", "No leak was detected:", "The model uses some of what is left:"
CENTRED = "centred on other secrets of the same conversation, information leaks"


@pytest.mark.parametrize(
    ("made_up", "said", "unsaid"),
    [
        ({"leak": 0.2, "inside": 0.2, "use": 0.5}, (LEAKS, CENTRED, USES, "in view gives 5"), ()),
        ({"leak": 0.2}, (LEAKS, "conversation, no leak was detected", "No use by the model"), (CENTRED,)),
        ({"leak": 0.0, "inside": 0.2}, (NONE, CENTRED), ()),
        ({"leak": -0.1, "use": -0.5}, ("doubt the run", "The retained cache turns the model away"), (LEAKS,)),
        ({"leak": 0.0, "changed": 0.2}, (NONE, "from the visible text, information leaks"), (LEAKS,)),
        ({"leak": 0.2, "p": 0.1}, ("A leak is not confirmed",), (LEAKS, "information leaks")),
        ({"leak": 0.0, "full": 0.2}, ("No leak was detected, but these probes cannot tell",), (NONE, LEAKS)),
        ({"leak": 0.2, "full": 0.2}, (LEAKS,), (NONE,)),
        ({"leak": 0.5, "use": 0.5, "count": 5}, (NONE, "No use by the model"), (LEAKS, "information leaks")),
        ({"leak": 0.2, "count": 1}, ("Information leaks within this one",), ("not trained on", "visible text")),
    ],
)
def test_the_answer_follows_intervals_and_permuted_labels(
    made_up: dict[str, Any], said: tuple[str, ...], unsaid: tuple[str, ...], tmp_path: Path
):
    page = answer_of(STUDY, *numbers(tables(**made_up)), tmp_path)
    assert [phrase for phrase in said if phrase not in page] == []
    assert [phrase for phrase in unsaid if phrase in page] == []
