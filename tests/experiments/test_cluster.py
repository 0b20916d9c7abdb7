"""Runs of two workers of Ray: the same tables as in this process, whatever becomes of a worker."""

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvprobe.errors import UserError
from kvprobe.experiments.cluster import Cluster, Workers, _Worker
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.experiments.skeleton import write_skeleton
from kvprobe.experiments.work import Work
from kvprobe.inference.model import Model, load
from kvprobe.studies import compaction, dangling, find, robustness
from tests.models import llama
from tests.refusals import refused

pytest.importorskip("ray", reason="Ray has no release for this version of Python")


@pytest.fixture(scope="module")
def model(smol_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """In a folder, where workers find it."""
    folder = tmp_path_factory.mktemp("model")
    shape = {"num_hidden_layers": 2, "vocab_size": len(smol_tokenizer), "max_position_embeddings": 2048}
    made = llama(seed=3, tokenizer=smol_tokenizer, initializer_range=0.4, **shape)
    made.lanes.plain.save_pretrained(folder)
    smol_tokenizer.save_pretrained(folder)
    return load(str(folder))


@pytest.fixture(scope="module")
def workers(model: Model) -> Iterator[Workers]:
    config = Settings(model=model.name)
    with Cluster(workers=2, threads=torch.get_num_threads()).started(config, model) as workers:
        yield workers


STUDIES = {
    "robustness": robustness.Config(
        tasks=("retrieve",), samples=2, faults=("zeros", "gaussian"), rates=(10.0,), procedure=0.0
    ),
    "dangling": dangling.Config(kinds=("code",), prompts=2, rescued=(1,), random=2, memos=0),
    "compaction": compaction.Config(contexts=3, samples=30, folds=3, continuation=2, answer=2),
}


def test_tables_are_those_of_this_process_row_for_row(
    model: Model, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Cluster, "started", lambda _, config, __: nullcontext(replace(workers, config=config)))
    monkeypatch.chdir(tmp_path)
    write_skeleton("hidden_thirds", tmp_path)
    own = find("hidden_thirds.py")
    for study, config in [*((find(name), config) for name, config in STUDIES.items()), (own, own.config(prompts=3))]:
        asked = replace(config, model=model.name)
        here = study.run(asked, tmp_path / "here")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Work, "write", lambda *_: pytest.fail("a case was measured in this process"))
            there = study.run(asked, tmp_path / "there", cluster=Cluster(workers=2))
        for table in here.path.glob("*.parquet"):
            pd.testing.assert_frame_equal(here.df(table.stem), there.df(table.stem), check_exact=True)
        assert here.metrics["findings"] == there.metrics["findings"]


def fragile(model: Model, config: Settings, number: int, folder: Path) -> Iterator[dict[str, int]]:
    """Its worker is killed in the third case, the first time."""
    begun = folder / f"{number}-{len(list(folder.glob(f'{number}-*')))}"
    begun.touch()
    if begun.name == "2-0":
        os.kill(os.getpid(), signal.SIGKILL)
    if number < 0:
        raise UserError("There is no such number.")
    yield {"number": number, "layers": model.geometry.n_layers}


def test_a_worker_that_is_killed_costs_its_case_alone(model: Model, workers: Workers, tmp_path: Path):
    begun = tmp_path / "begun"
    begun.mkdir()
    parts = Parts(model, workers.config, Run(tmp_path, workers=workers))
    table = parts.table(fragile, range(6), "cases", begun, doing="Measuring", unit="case")
    assert table.to_dict("list") == {"number": [*range(6)], "layers": [2] * 6}
    assert sorted(path.name for path in begun.iterdir()) == ["0-0", "1-0", "2-0", "2-1", "3-0", "4-0", "5-0"]
    refused(
        lambda: parts.table(fragile, [-1], "none", begun, doing="Measuring", unit="case"), "There is no such number."
    )


def test_what_workers_cannot_hold_is_refused_in_a_sentence(model: Model, workers: Workers, tmp_path: Path):
    def started(cluster: Cluster) -> None:
        with cluster.started(workers.config, model):
            pytest.fail("it is large enough")

    refused(lambda: started(Cluster(workers=3, threads=1)), "room for 2 workers with 1 CPUs each, not for 3")
    refused(lambda: started(Cluster(threads=3)), "room for 0 workers")
    refused(lambda: started(Cluster(gpus=0.5)), "room for 0 workers with 1 CPUs and 0.5 GPUs each")
    refused(lambda: Cluster(workers=0), "workers", "at least 1")
    refused(lambda: Cluster(gpus=-1.0), "gpus", "at least 0")
    other, half = ("0" * 16 + "-0-0", "cpu", "float32"), (model.fingerprint, "cuda", "bfloat16")
    refused(lambda: _Worker(workers.config, other, 1, str(tmp_path)), "is not that of the run")
    refused(lambda: _Worker(workers.config, half, 1, str(tmp_path)), "computes on cpu in float32, and the run on cuda")
    config = robustness.Config()
    refused(lambda: find("robustness").run(config, tmp_path, model=model, cluster=Cluster()), "by its name")
