"""From a run to published probes, and from a probing to the probe that a run keeps."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from kvprobe.cli import app
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.inference.model import Model
from kvprobe.probes.card import CARD, CARD_SPLITS, WEIGHTS, Measure, ProbeInput, Training
from kvprobe.probes.fitted import fitted_probe
from kvprobe.probes.probe import Probe
from kvprobe.probes.publishing import publish
from kvprobe.probing.features import Features
from kvprobe.probing.probe_features import probe_features
from kvprobe.studies.leakage.candidate import candidate_probe
from kvprobe.tasks.designs import Target
from tests.probes.made_probes import TARGET, made_probe
from tests.probing.planted import planted
from tests.refusals import refused

VALUES = ProbeInput("v", 1, None, "mean")


@pytest.fixture
def run(tiny_llama: Model, tmp_path: Path) -> Run:
    run = Run.open("leakage", Settings(seed=3), tiny_llama.fingerprint, "cpu, float32", tmp_path / "runs")
    for name in ("one", "two"):
        made_probe(tiny_llama, VALUES, name=name, scale=len(name + name[0])).save(run.path / "probes" / name)
    run.finish({})
    return run


def test_published_probes_are_those_of_the_run_with_the_command_that_made_them(run: Run, tmp_path: Path):
    folders = publish(run, tmp_path / "probes")
    assert [folder.name for folder in folders] == ["one", "two"]
    for folder in folders:
        probe, kept = Probe.load(folder), Probe.load(run.path / "probes" / folder.name)
        assert {path.name for path in folder.iterdir()} == {CARD, WEIGHTS, "README.md"}
        assert torch.equal(probe.linear.weights, kept.linear.weights)
        assert dataclasses.replace(probe.card, made=kept.card.made) == kept.card
        assert (probe.card.made.command, probe.card.made.seed) == (run.environment["command"], 3)
        assert run.environment["command"].replace("|", "\\|")[:20] in (folder / "README.md").read_text()
    assert {path.name for path in (tmp_path / "probes").iterdir()} == {"one", "two"}


def test_publishing_again_changes_nothing_and_never_writes_over_another_probe(
    run: Run, tiny_llama: Model, tmp_path: Path
):
    (folder,) = publish(run, tmp_path, "one")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    publish(run, tmp_path, "one")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    made_probe(tiny_llama, VALUES, name="one", scale=7).save(run.path / "probes" / "one")
    refused(lambda: publish(run, tmp_path), "holds something else")
    assert not (tmp_path / "two").exists()
    (tmp_path / "two").mkdir()
    refused(lambda: publish(run, tmp_path, "two"), "holds something else")


def test_publishing_deletes_nothing_that_it_did_not_write(run: Run, tmp_path: Path):
    (folder,) = publish(run, tmp_path, "one")
    for mine in (folder / "notes.md", tmp_path / "one.partial" / "thesis.tex"):
        mine.parent.mkdir(exist_ok=True)
        mine.write_text("precious")
    publish(run, tmp_path, "one")
    assert (folder / "notes.md").read_text() == (tmp_path / "one.partial" / "thesis.tex").read_text() == "precious"
    assert {path.name for path in folder.iterdir()} == {CARD, WEIGHTS, "README.md", "notes.md"}


def test_a_run_that_has_nothing_to_publish_is_refused(run: Run, tmp_path: Path):
    refused(lambda: publish(run, tmp_path, "ones"), "did you mean 'one'")
    environment = run.environment | {"model": "0123456789abcdef"}
    (run.path / "env.json").write_text(json.dumps(environment))
    refused(lambda: publish(run, tmp_path), "ran on 0123456789abcdef")
    bare = Run.open("leakage", Settings(seed=3), "x", "cpu", tmp_path / "runs", "bare")
    refused(lambda: publish(bare, tmp_path), "unfinished")
    bare.finish({})
    refused(lambda: publish(bare, tmp_path), "has no probes")


def test_the_command_publishes_and_says_where(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command, bound, _ = app.parse_args(["publish", str(run.path), "--to", str(tmp_path / "shelf"), "--name", "two"])
    command(*bound.args, **bound.kwargs)
    assert capsys.readouterr().out.split() == [str(tmp_path / "shelf" / "two")]


def test_a_leak_needs_so_many_bits_that_nine_of_ten_held_out_readings_are_right(tiny_llama: Model):
    features, labels, _ = planted(2000, 5, 2.0)
    contexts, target = np.arange(2000) % 50, Target("digit", tuple("01234"))
    measures = [Measure("accuracy", split, 0.6, 0.5, 0.7) for split in CARD_SPLITS]

    def trained(seen: torch.Tensor, fresh: torch.Tensor) -> Training:
        training = Training("leakage", "a digit", "T3", "retained")
        probe = Probe.fit(tiny_llama, seen, labels, contexts, target, VALUES, training, measures, restart=fresh)
        return probe.card.training

    blind = features[0].mean(0).expand(2000, -1)
    leaking = trained(features[0], blind)
    assert leaking.gain is not None
    assert leaking.power is not None
    fitted = fitted_probe(features[0], labels, contexts, 5, restart=blind, rng=np.random.default_rng([0, 7]))
    assert fitted.gains is not None
    called = fitted.gains >= leaking.gain
    assert float(fitted.right[called].double().mean()) == pytest.approx(0.9, abs=0.005)
    assert float(called.double().mean()) == pytest.approx(leaking.power)
    assert (trained(features[0], features[0]).gain, trained(features[0], features[0]).power) == (None, 0.0)
    noise = torch.randn(features[0].shape, generator=torch.Generator().manual_seed(1))
    assert trained(noise, torch.zeros_like(noise)).power == 0.0


def test_the_probe_that_a_run_keeps_is_of_the_site_that_reads_and_has_its_numbers(tiny_llama: Model):
    generator = torch.Generator().manual_seed(0)
    contexts = np.repeat(np.arange(15), 16)
    labels = torch.randint(0, 3, (2, 240), generator=generator)
    # Only layer 2, mean, holds the labels.
    tensor = torch.randn(240, 3, 2, 16, generator=generator)
    for place, classes in enumerate(labels):
        tensor[torch.arange(240), 2, 0, 3 * place + classes] += 4
    rows = np.arange(240)
    features = Features.of_read_outs({"v": tensor}, rows, labels, contexts, TARGET)
    floor = Features.of_read_outs({"v": torch.randn(tensor.shape, generator=generator)}, rows, labels, contexts, TARGET)
    probing = probe_features(features, {"restart": floor}, permutations=19, rng=np.random.default_rng(0))
    training = Training("leakage", "a digit", "T3", "retained")
    probe = candidate_probe(tiny_llama, features, probing, training, restart=floor)
    assert probe.site == ProbeInput("v", 2, None, "mean")
    assert probe.name == "llamaforcausallm-digit-t3"
    assert probe.card.reads_unseen
    assert (probe.card.training.searched, probe.card.training.agreed) == (6, 1.0)
    assert (probe.card.training.samples, probe.card.training.contexts) == (240, 15)
    said = probe.probabilities(tensor[:, 2, 0]).argmax(-1)
    assert float(said.T.eq(labels).double().mean()) > 0.9
    rows = probing.summary.set_index(["split", "reading"])
    accuracy = probe.card.measure("accuracy")
    assert accuracy is not None
    assert accuracy.mean == pytest.approx(rows.loc["leave-context-out", "retained"]["accuracy"])
    assert probe.card.measure("p") is not None
    assert probe.card.training.gain is not None
    assert probe.card.training.power is not None
    assert 0.5 < probe.card.training.power <= 1
    assert candidate_probe(tiny_llama, features, probing, training).card.training.power is None

    still = torch.zeros_like(tensor)
    still[:, 0, 1] = torch.randn(240, 16, generator=generator)
    only = Features.of_read_outs({"v": still}, np.arange(240), labels, contexts, TARGET)
    assert candidate_probe(tiny_llama, only, probing, training).site == ProbeInput("v", 0, None, "last")
    refused(
        lambda: candidate_probe(tiny_llama, only, probing, training, restart=only, less_restart=True),
        "no probe to propose",
    )

    alone = Features.of_read_outs(
        {"v": tensor}, rows=np.arange(240), labels=labels, contexts=contexts * 0, target=TARGET
    )
    single = probe_features(alone, {}, permutations=0, rng=np.random.default_rng(0))
    refused(lambda: candidate_probe(tiny_llama, alone, single, training), "share one context")
