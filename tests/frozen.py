"""Every study once on tiny random models, and its numbers in a file: what a refactoring must not change.

    python -m tests.frozen OUT_DIR
    python -m tests.frozen OUT_DIR --only leakage,use
    python -m tests.frozen --compare BEFORE AFTER

The first writes OUT_DIR/<study>.json, the `metrics.json` of each run without measured times, measured bytes and paths.
Runs are those of `tests/studies`: their fixture `finished` is made by the test module's own functions, outside of
pytest and without the checking of annotations. Nothing of kvprobe is named here but `load`. What is compared must come
from one machine: other processors round otherwise.
"""

import argparse
import inspect
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

CLOSE = 1e-9
"""Numbers that differ by no more, absolutely or relatively, are called equal."""

MODULES = {
    "leakage": "test_leakage",
    "leakage_scaling": "test_leakage_scaling",
    "compaction": "test_compaction",
    "policies": "test_policies",
    "idle_rebuild": "test_idle_rebuild",
    "robustness": "test_robustness",
    "bands": "test_bands",
    "bitflips": "test_bitflips",
    "patching": "test_patching_study",
    "carriers": "test_carriers_study",
    "dangling": "test_dangling",
    "memory": "test_memory",
    "use": "test_use",
    "filter_poison": "test_filter_poison",
    "multihop": "test_multihop",
    "features": "test_features",
    "routing": "test_routing_study",
    "poisoning": "test_poisoning_study",
    "code_poisoning": "test_code_poisoning",
    "reliance": "test_reliance_study",
    "memento_toy": "test_memento_toy",
    "lossy_memento": "test_lossy_memento",
    "pointers": "test_pointers",
    "guard": "test_guard",
    "ghost_state": "test_ghost_state",
    "detection": "test_detection",
    "engines": "test_engines",
    "forgetting": "test_forgetting",
    "compose": "test_compose",
    "finetuned": "test_finetuned",
}
"""Where each study's tiny run is."""
AROUND = {
    "carriers": ("short",),
    "dangling": ("four_facts",),
    "features": ("few_texts",),
    "filter_poison": ("four_facts",),
    "patching": ("tiny_facts",),
    "policies": ("short",),
}
"""Fixtures that pytest puts around a module's tests unasked."""
MEASURED = (
    "time",
    "faster",
    "slope",
    "measured",
    "at_batch",
    "batch_slope",
    "worst_batch",
    "error",
    "worst",
    "worst_at",
)
"""Findings of the memory study that are measured times or bytes."""


def more_of_policies(tests: Any, patch: Any) -> None:
    """All kinds of policies; on real weights the tests run only some of them."""
    patch.setattr(tests, "MEASURED", tuple(tests.CATALOGUE))


MORE: dict[str, Callable[[Any, Any], None]] = {"policies": more_of_policies}
"""What a run holds here beyond what it holds in the tests."""
SETTINGS = {
    "leakage": {"untrained": True},
    "compaction": {"contexts": 8, "samples": 48},
    "policies": {"samples": 8},
    "dangling": {"memos": 20},
    "idle_rebuild": {"sessions": 8},
}
"""What is changed in the tests' settings: an untrained model and enough conversations for intervals, where they are for
real weights; and the memos, which the tests leave out of their run."""


@cache
def real_tokenizer() -> Any:
    """The tokenizer of SmolLM2-135M, under which real conversations are short; its weights are not used."""
    import kvprobe

    return kvprobe.load("smollm2-135m").tokenizer


def tiny_with_words() -> Any:
    """A tiny random model that stands in for SmolLM2-135M."""
    from tests.models import llama

    words = real_tokenizer()
    return llama(seed=1, tokenizer=words, vocab_size=len(words), initializer_range=0.4, max_position_embeddings=2048)


def tiny_llama() -> Any:
    from tests.models import llama, tiny_tokenizer

    return llama(tokenizer=tiny_tokenizer())


class Folders:
    """Stands in for pytest's factory of temporary folders."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def mktemp(self, name: str) -> Path:
        folder = self.root / name
        folder.mkdir()
        return folder


class Fixtures:
    """The fixtures of a test module, each made once, by a function above, of the module or of its conftest."""

    def __init__(self, tests: ModuleType, root: Path, stack: ExitStack) -> None:
        self._tests, self._stack, self._shared = tests, stack, import_module("tests.studies.conftest")
        self._own: dict[str, Callable[[], Any]] = {
            **dict.fromkeys(("smol", "wordy"), tiny_with_words),
            "tiny_llama": tiny_llama,
            "tmp_path_factory": lambda: Folders(root),
            "request": lambda: SimpleNamespace(module=tests, getfixturevalue=self.__getitem__),
        }
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            place = self._tests if hasattr(self._tests, name) else self._shared
            self._made[name] = self._make(self._own.get(name) or inspect.unwrap(getattr(place, name)))
        return self._made[name]

    def _make(self, function: Callable[..., Any]) -> Any:
        needed = {name: self[name] for name in inspect.signature(function).parameters}
        if inspect.isgeneratorfunction(function):
            return self._stack.enter_context(contextmanager(function)(**needed))
        return function(**needed)


def metrics_of(study: str, root: Path) -> Any:
    """The metrics of a study's tiny run, without measured times, bytes and paths."""
    import pytest

    tests = import_module(f"tests.studies.{MODULES[study]}")
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        if study in SETTINGS:
            patch.setattr(tests, "SMALL", replace(tests.SMALL, **SETTINGS[study]))
        if study in MORE:
            MORE[study](tests, patch)
        made = Fixtures(tests, root, stack)
        for name in AROUND.get(study, ()):
            _ = made[name]
        text = (made["finished"].path / "metrics.json").read_text(encoding="utf-8")
    metrics = json.loads(text.replace(str(root), "ROOT"))
    if study == "memory":
        metrics["findings"] = [finding for finding in metrics["findings"] if finding["name"] not in MEASURED]
    return metrics


def write(out: Path, studies: list[str]) -> None:
    """Run the studies one after the other, and say how long each took."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    import torch

    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    for study in studies:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as root:
            metrics = metrics_of(study, Path(root))
        text = json.dumps(metrics, indent=1, ensure_ascii=False)
        (out / f"{study}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{study}: {time.perf_counter() - start:.1f} s", flush=True)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every number, string, truth value and null, and what is empty, with the path to it: the place in a list, but for
    findings the name and keys."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(item, f"{path}/{name}")
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            is_finding = isinstance(item, dict) and {"name", "keys"} <= item.keys()
            called = f"{item['name']}{dict(sorted(item['keys'].items()))}" if is_finding else index
            yield from leaves(item, f"{path}/{called}")
    else:
        yield path, value


def equal(one: Any, other: Any) -> bool:
    kinds = [isinstance(number, int | float) and not isinstance(number, bool) for number in (one, other)]
    if all(kinds):
        both_nan = math.isnan(one) and math.isnan(other)
        return both_nan or math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE)
    return type(one) is type(other) and one == other


def compare(before: Path, after: Path) -> bool:
    """Print what differs, numbers first and strings after them; whether anything but strings does.

    A file, key or entry that only one of the two has counts as a number.
    """
    numbers, strings, counted = [], [], 0
    for name in sorted({path.name for folder in (before, after) for path in folder.glob("*.json")}):
        study, files = name.removesuffix(".json"), (before / name, after / name)
        if not all(file.is_file() for file in files):
            numbers.append(f"{study}: only in {before if files[0].is_file() else after}")
            continue
        one, other = (dict(leaves(json.loads(file.read_text(encoding="utf-8")), study)) for file in files)
        counted += len(one)
        for path in [*one, *(path for path in other if path not in one)]:
            if path not in one or path not in other:
                place, value = ("before", one[path]) if path in one else ("after", other[path])
                numbers.append(f"{path}: only {place}: {value!r}")
            elif not equal(one[path], other[path]):
                both_texts = isinstance(one[path], str) and isinstance(other[path], str)
                (strings if both_texts else numbers).append(f"{path}: {one[path]!r} -> {other[path]!r}")
    for title, lines in (("numbers and keys", numbers), ("strings", strings)):
        print(f"{len(lines)} {title} differ")
        print("".join(f"  {line}\n" for line in lines), end="")
    print(f"{counted} values compared")
    if not counted:
        raise FileNotFoundError(f"There is nothing to compare in {before} and {after}.")
    return bool(numbers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT_DIR")
    parser.add_argument("--only", default=",".join(MODULES), help="studies, with commas between")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    given = parser.parse_args()
    if (given.out is None) == (given.compare is None):
        parser.error("expected either OUT_DIR or --compare")
    if given.compare:
        sys.exit(compare(*given.compare))
    studies = given.only.split(",")
    if wrong := set(studies) - set(MODULES):
        parser.error(f"no such study: {', '.join(sorted(wrong))}")
    write(given.out, studies)


if __name__ == "__main__":
    main()
