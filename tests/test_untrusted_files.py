"""Files that anyone may have altered: whatever reads one ends in a result or in one sentence, a `UserError`."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import kvprobe as kv
from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import from_mapping
from kvprobe.presets import read_preset
from kvprobe.probes.card import ProbeInput
from kvprobe.saes import Dictionary, Place
from kvprobe.studies import find
from kvprobe.tasks.jsonl import JSONLines
from tests.experiments.test_untrusted_runs import KINDS, OF_CONTENT, mutate, refusal
from tests.models import any_model
from tests.probes.made_probes import made_probe
from tests.saes.test_quality import identity
from tests.studies.test_leakage import example

MODEL = any_model()
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": [{"text": "b", "name": "c"}]}]


def make_run(folder: Path) -> None:
    config, conclusion = example()
    run = Run.open("leakage", config, MODEL.fingerprint, "cpu, float32", folder.parent, folder.name)
    run.save_table("samples", pd.DataFrame({"sample": [0, 1]}))
    run.finish(conclusion.record())


def make_texts(folder: Path) -> None:
    folder.mkdir()
    (folder / "chat.json").write_text(json.dumps({"messages": CHAT, "id": "one"}))
    (folder / "chat.jsonl").write_text("\n".join(json.dumps({"conversations": CHAT}) for _ in range(2)))
    (folder / "tasks.jsonl").write_text(json.dumps({"prompt": CHAT[:1], "answer": "b", "id": "one"}))
    (folder / "preset.yaml").write_text(yaml.safe_dump({"study": "leakage", "settings": {"samples": 96}}))


def read_run(folder: Path) -> None:
    run = Run.load(folder)
    for read in (lambda: run.config, lambda: run.environment, lambda: run.metrics, lambda: run.findings, run.tables):
        refusal(read)


def read_texts(folder: Path) -> None:
    for chat in ("chat.json", "chat.jsonl"):
        refusal(lambda chat=chat: kv.read_chat(folder / chat, 0).tokens(MODEL.tokenizer))
    refusal(lambda: JSONLines(folder / "tasks.jsonl").items(1, 0))
    preset = read_preset(folder / "preset.yaml")
    from_mapping(find(preset.study).config, preset.settings)


MAKERS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "run": (make_run, read_run),
    "texts": (make_texts, read_texts),
    "probe": (made_probe(MODEL, ProbeInput("v", 1, None, "mean")).save, kv.Probe.load),
    "dictionary": (
        lambda folder: Dictionary(identity(32), Place("resid_post", 1)).save(folder),
        lambda folder: Dictionary.load(folder, MODEL, Place("resid_post", 1)),
    ),
    "cache": (
        lambda folder: MODEL.prefill("a b").save(folder / "cache.safetensors"),
        lambda folder: kv.KVCache.load(folder / "cache.safetensors"),
    ),
}
FILES = {
    "run": ("config.yaml", "env.json", "metrics.json", "samples.parquet"),
    "texts": ("chat.json", "chat.jsonl", "tasks.jsonl", "preset.yaml"),
    "probe": ("card.yaml", "weights.safetensors"),
    "dictionary": ("cfg.json", "sae_weights.safetensors"),
    "cache": ("cache.safetensors",),
}
TENSORS = ("dtype", "shape", "less", "more", "nan")
MORE = ("latin", "loop", "list", "number", "text")
CASES = [(of, file) for of, files in FILES.items() for file in files]


def alter(path: Path, kind: str, rng: random.Random) -> None:
    """Change a file as one kind of accident or malice does."""
    if kind in TENSORS:
        tensors = load_file(path)
        name = rng.choice(sorted(tensors))
        if kind in ("less", "more"):
            changed = {} if kind == "less" else {name: tensors[name], "more": torch.zeros(2)}
        else:
            tensor = tensors[name]
            other = {"dtype": tensor.to(torch.int8), "nan": torch.full_like(tensor.float(), torch.nan)}
            changed = {name: other.get(kind, tensor.flatten()[:1])}
        save_file({key: one for key, one in tensors.items() if key != name} | changed, path)
    elif kind == "latin":
        path.write_bytes("\xff\xfe{é".encode("latin-1"))
    elif kind == "loop":
        path.unlink()
        path.symlink_to(path)
    else:
        path.write_text({"list": "[1, [2]]", "number": "1" * 400, "text": '"a"'}[kind])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each kind, as kvprobe or its user writes it."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "cache").mkdir()
    for name, (make, _) in MAKERS.items():
        make(folder / name)
    return folder


@pytest.mark.parametrize(("of", "file"), CASES)
def test_an_altered_file_is_read_or_refused_in_a_sentence(
    of: str, file: str, whole: Path, tmp_path: Path, unchecked: None, recwarn: pytest.WarningsRecorder
):
    rng = random.Random(f"{of} {file}")
    kinds = [*KINDS, *MORE, *(OF_CONTENT * 3 if file.endswith((".yaml", ".json")) else ())]
    wrong: list[str] = []
    for number, kind in enumerate([*kinds, *(TENSORS if file.endswith("safetensors") else ())]):
        folder = shutil.copytree(whole / of, tmp_path / str(number))
        if kind in (*KINDS, *OF_CONTENT):
            mutate(folder, file, kind, rng)
        else:
            alter(folder / file, kind, rng)
        try:
            said = refusal(lambda folder=folder: MAKERS[of][1](folder)) or ""
        except Exception as error:
            wrong.append(f"{kind}: {type(error).__name__}: {error}")
        else:
            wrong += [f"{kind}: {said}"] if "\n" in said else []
    assert not wrong, "\n".join(wrong)


def test_folders_that_were_not_altered_are_read(whole: Path):
    for name, (_, read) in MAKERS.items():
        read(whole / name)


@pytest.mark.parametrize(
    "place", ["none", "file", "folder", "loop", "file/inside", "loop/inside", "a" * 300, "~nobody"]
)
def test_a_place_that_holds_something_else_is_refused_in_a_sentence(place: str, tmp_path: Path):
    (tmp_path / "file").write_bytes(b"\xff\x00\xff")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    path = Path(place) if place.startswith("~") else tmp_path / place
    readers: list[Callable[[Path], object]] = [Run.load, kv.Probe.load, kv.KVCache.load, kv.read_chat, read_preset]
    for read in (*readers, JSONLines, kv.load, MAKERS["dictionary"][1]):
        assert "\n" not in (refusal(lambda read=read: read(path)) or "\n")
    for of in ("probe", "dictionary", "cache") if place not in ("none", "folder", "~nobody") else ():
        assert "\n" not in (refusal(lambda of=of: MAKERS[of][0](path / "new")) or "\n")
