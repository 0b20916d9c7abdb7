"""Runs of two workers of Ray: the same tables as in this process, whatever becomes of a worker."""

import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pandas as pd
import psutil
import pytest
import torch

from kvprobe.environment import software
from kvprobe.errors import UserError
from kvprobe.executors import Cluster, RayWorkers, _refuse_other_software, _threads_each, _Worker
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import Settings
from kvprobe.experiments.skeleton import write_skeleton
from kvprobe.experiments.work import Work
from kvprobe.inference.elsewhere import SameModel, working
from kvprobe.inference.model import Model, load
from kvprobe.models.noted import NotedFile, noted
from kvprobe.studies import compaction, dangling, find, robustness
from tests.executed import assert_identical, tables
from tests.models import any_model, llama
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
def workers(model: Model) -> Iterator[RayWorkers]:
    with working(Cluster(workers=2, threads=torch.get_num_threads()), model) as workers:
        yield workers


STUDIES = {
    "robustness": robustness.Config(
        tasks=("retrieve",), samples=2, faults=("zeros", "gaussian"), rates=(10.0,), procedure=0.0
    ),
    "dangling": dangling.Config(kinds=("code",), prompts=2, rescued=(1,), random=2, memos=0),
    "compaction": compaction.Config(contexts=3, samples=30, folds=3, continuation=2, answer=2),
}


def test_tables_are_those_of_this_process_row_for_row(
    model: Model, workers: RayWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Cluster, "started", lambda _, *held: workers.started(*held))
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


def test_a_worker_that_is_killed_costs_its_case_alone(model: Model, workers: RayWorkers, tmp_path: Path):
    begun = tmp_path / "begun"
    begun.mkdir()
    parts = Parts(model, Settings(model=model.name), Run(tmp_path, workers=workers))
    table = parts.table(fragile, range(6), "cases", begun, doing="Measuring", unit="case")
    assert table.to_dict("list") == {"number": [*range(6)], "layers": [2] * 6}
    assert sorted(path.name for path in begun.iterdir()) == ["0-0", "1-0", "2-0", "2-1", "3-0", "4-0", "5-0"]
    refused(
        lambda: parts.table(fragile, [-1], "none", begun, doing="Measuring", unit="case"), "There is no such number."
    )


DRIVER = """
import os, signal, sys
from pathlib import Path
from kvprobe.executors import Cluster
from kvprobe.experiments.runs import Run
from kvprobe.studies import find

whole, written = Run.write_part, []

def dying(run, name, write):
    def half(partial):
        write(partial)
        written.append(name)
        if len(written) == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)
    return whole(run, name, half)

Run.write_part = dying
own = find("hidden_thirds.py")
dies = int(sys.argv[2])
cluster = Cluster(workers=1, threads=1) if dies else None
own.run(own.config(prompts=4, model=sys.argv[1]), Path("killed"), cluster=cluster)
print(len(written))
"""


def test_a_driver_that_is_killed_leaves_no_processes_and_its_run_goes_on(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write_skeleton("hidden_thirds", tmp_path)
    place = os.environ | {"KVPROBE_TEST_DRIVER": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", DRIVER, model.name, "3"]
    done = subprocess.run(command, env=place, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = [process for process in psutil.process_iter() if _environment(process).get("KVPROBE_TEST_DRIVER")]
    assert not psutil.wait_procs(left, 60)[1], "they outlive their driver"
    # Without workers, and in a process of its own, too: what a study's code is digested from is what is imported there.
    command[-1] = "0"
    done = subprocess.run(command, env=place, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["2"]), done.stderr
    own = find("hidden_thirds.py")
    sound = own.run(own.config(prompts=4, model=model.name), tmp_path / "sound")
    (resumed,) = (tmp_path / "killed").iterdir()
    # To rounding: this process has other threads than the workers.
    pd.testing.assert_frame_equal(pd.read_parquet(resumed / "samples.parquet"), sound.df(), rtol=1e-3)
    assert {path.name for path in resumed.iterdir()} | {"timing.json"} == {path.name for path in sound.path.iterdir()}


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}


def test_functions_give_the_same_numbers_on_workers_to_the_bit(model: Model, workers: RayWorkers):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_identical(tables(model, None), tables(model, workers))


def reading_another(model: Model, config: Settings, number: int, folder: Path) -> Iterator[dict[str, float]]:
    """Reads another model, whose file holds other weights from the second case on."""
    other = load(str(folder))
    if not number:
        other.lanes.plain.get_output_embeddings().weight.data += 1
    yield {"norm": float(other.lanes.plain.get_output_embeddings().weight.norm())}


def reading_a_file(model: Model, config: Settings, number: int, name: str) -> Iterator[dict[str, float]]:
    """Goes by a file, of which a worker has this one."""
    noted(name, NotedFile("1" * 16, model.computes))
    yield {"norm": float(number)}


def test_another_model_of_a_worker_is_held_against_that_of_the_others(
    model: Model, workers: RayWorkers, tmp_path: Path
):
    def table(run: Run) -> pd.DataFrame:
        parts = Parts(model, Settings(model=model.name), run)
        return parts.table(reading_another, range(2), "other", model.name, doing="Reading", unit="case")

    refused(
        lambda: table(Run(tmp_path, workers=workers)),
        f"'{model.name} in float32' of one worker is not that of another, or of the caller (it differs in weights)",
    )
    known = {"inputs": {model.name: "0" * 16 + "-0-0"}}
    run = Run(tmp_path, begun=known, workers=workers)
    refused(lambda: table(run), "or of the caller")


def test_another_adapter_of_a_worker_is_held_against_that_of_the_caller(
    model: Model, workers: RayWorkers, tmp_path: Path
):
    def table(digest: str) -> pd.DataFrame:
        settings = Settings(model=model.name)
        run = Run.open("own", settings, model.fingerprint, model.computes, tmp_path, digest, {"french": digest})
        parts = Parts(model, settings, replace(run, workers=workers))
        return parts.table(reading_a_file, range(2), "file", "french", doing="Reading", unit="case")

    refused(lambda: table("0" * 16), "'french in float32' of one worker is not that", "differs in content")
    assert len(table("1" * 16)) == 2


@pytest.mark.parametrize("package", ["kvprobe", "torch"])
def test_a_worker_with_other_software_is_refused(package: str):
    _refuse_other_software(software(), software())
    others = {**software(), package: "of another time"}
    refused(
        lambda: _Worker(lambda: None, 1, "", others), f"A worker has {package} ", "and the process that asks of another"
    )


def test_what_workers_cannot_hold_is_refused_in_a_sentence(model: Model, workers: RayWorkers, tmp_path: Path):
    def started(cluster: Cluster) -> None:
        with working(cluster, model):
            pytest.fail("it is large enough")

    refused(lambda: started(Cluster(workers=3, threads=1)), "room for 2 workers with 1 CPUs each, not for 3")
    refused(lambda: started(Cluster(threads=3)), "room for 0 workers")
    refused(lambda: started(Cluster(gpus=0.5)), "room for 0 workers with 1 CPUs and 0.5 GPUs each")
    refused(lambda: Cluster(workers=0), "workers", "at least 1")
    refused(lambda: Cluster(gpus=-1.0), "gpus", "at least 0")
    refused(replace(SameModel.of(model), fingerprint="0" * 16 + "-0-0"), "is not that of the caller (it differs in")
    refused(lambda: SameModel.of(any_model()), "LlamaForCausalLM")
    with pytest.raises(UserError, match="These workers hold another model"):
        workers.started(model, lambda _: len, torch.device("cpu")).__enter__()
    config = robustness.Config()
    refused(lambda: find("robustness").run(config, tmp_path, model=model, cluster=Cluster()), "by its name")


def test_the_cpus_of_a_cluster_are_shared_out_as_its_machines_allow():
    def each(workers: int, gpus: float, *machines: dict[str, float]) -> int:
        nodes = [{"Alive": True, "Resources": there} for there in machines]
        return _threads_each(SimpleNamespace(nodes=lambda: nodes), workers, gpus)

    assert each(32, 1.0, *[{"CPU": 64.0, "GPU": 8.0}] * 4) == 8
    assert each(5, 0.0, *[{"CPU": 6.0}] * 4) == 3
    assert each(2, 0.0, {"CPU": 8.0}, {"CPU": 1.0}) == 4
    assert each(9, 0.0, {"CPU": 8.0}) == 1


CONNECTS = """
import sys
from kvprobe.executors import _begin, _ray
ray = _ray(sys.argv[1])
_begin(ray, sys.argv[1], 1)
print(ray.cluster_resources()["CPU"])
"""


def test_a_cluster_at_an_address_gets_the_token_that_it_asks_for(tmp_path: Path):
    """`ray start` asks for one by default, and what connects to an address sends none by default."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    starting = ["start", "--head", "--block", f"--port={port}", "--num-cpus=1", "--include-dashboard=false"]
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # its sockets need a short path
        command = [sys.executable, "-m", "ray.scripts.scripts", *starting, f"--temp-dir={folder}"]
        head = subprocess.Popen(
            [*command, "--object-store-memory=100000000"],
            env=place,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while head.poll() is None and not _listens(port):
                time.sleep(0.2)
            done = subprocess.run(
                [sys.executable, "-c", CONNECTS, f"127.0.0.1:{port}"], env=place, capture_output=True, text=True
            )
            assert done.stdout.split() == ["1.0"], done.stderr[-500:]
        finally:
            head.terminate()
            head.wait()


def _listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0
