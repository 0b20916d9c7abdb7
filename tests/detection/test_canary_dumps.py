"""A canary of dumps: what an engine dumped of requests that begin alike is the same, and a wrong block is found."""

import json
from pathlib import Path

import numpy as np
import pytest

import kvprobe as kv
from kvprobe.cache.cache import KVCache
from kvprobe.cli.entry import app
from kvprobe.detection.canary import canary_of_dumps
from kvprobe.errors import UserError
from kvprobe.faults import Fault, NotANumber, Scope, Zeros
from kvprobe.inference.model import Model
from kvprobe.text.tokens import Tokens
from tests.models import llama

IDS = np.random.default_rng(3).integers(1, 60, 64).tolist()


@pytest.fixture(scope="module")
def tiny() -> Model:
    return llama(initializer_range=0.4)


def read(tiny: Model, ids: list[int], first: int) -> KVCache:
    """As an engine reads a prompt of which the first tokens are in its cache."""
    rest = Tokens.of(ids[first:], start=first)
    return tiny.extend(tiny.prefill([Tokens.of(ids[:first])]), [rest])[0]


def dump(tiny: Model, folder: Path, wrong: Fault | None = None) -> None:
    """A request without reuse, the same with it, its beginning reused by a longer one, and another text."""
    caches = {
        "0-cold": tiny.prefill([Tokens.of(IDS[:48])]),
        "1-again": read(tiny, IDS[:48], 32),
        "2-longer": read(tiny, IDS[:32] + IDS[:20], 32),
        "3-other": tiny.prefill([Tokens.of(IDS[::-1])]),
    }
    for name, cache in caches.items():
        struck = wrong is not None and name == "1-again"
        kv.save_plain(cache.corrupt(wrong) if struck and wrong else cache, folder / f"{name}.json")


def test_dumps_that_begin_alike_are_alike_and_a_wrong_block_is_found(tiny: Model, tmp_path: Path):
    dump(tiny, tmp_path)
    sound = canary_of_dumps(tmp_path)
    assert sound.failed == []
    assert [(one.reference, one.shared) for one in sound.dumps] == [
        ("", 0), ("0-cold.json", 48), ("0-cold.json", 32), ("", 0),
    ]  # fmt: skip
    dump(tiny, tmp_path, Zeros(scope=Scope(layers=(1,), slots=range(16, 32))))
    found = canary_of_dumps(tmp_path)
    assert found.failed == ["1-again.json"]
    difference = found.dumps[1].difference
    assert difference is not None
    assert difference.first is not None
    assert (difference.kind, difference.first.layer, difference.first.block) == ("zeroed", 1, 1)
    assert found.dumps[2].reference == "0-cold.json"  # not the wrong one, which begins alike as well
    by_model = canary_of_dumps(tmp_path, tiny)
    assert by_model.failed == ["1-again.json"]
    assert by_model.dumps[3].shared == 64


def test_the_command_ends_with_1_and_refuses_what_holds_no_dumps(
    tiny: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    dump(tiny, tmp_path, NotANumber(scope=Scope(layers=(0,), slots=[40])))
    with pytest.raises(SystemExit) as ended:
        app(["canary", "--dumps", str(tmp_path), "--json"], exit_on_error=False)
    assert ended.value.code == 1
    assert json.loads(capsys.readouterr().out)["failed"] == ["1-again.json"]
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="no files in"):
        canary_of_dumps(empty)
    with pytest.raises(UserError, match="no folder"):
        canary_of_dumps(tmp_path / "nowhere")
    kv.save_plain(tiny.prefill(IDS), empty / "lone.json")
    with pytest.raises(UserError, match="first 16 tokens in common"):
        canary_of_dumps(empty)


def test_dumps_of_several_texts_and_of_hidden_slots_are_not_called_sound(tiny: Model, tmp_path: Path):
    """Of these nothing, or only what the first texts have in common, would be compared."""
    first, zeros = Tokens.of(IDS[:48]), Zeros(scope=Scope(layers=(1,), slots=range(16, 32)))
    tiny.prefill([first, Tokens.of(IDS[::-1][:48])]).save(tmp_path / "0-cold")
    tiny.prefill([first, first]).corrupt(zeros).save(tmp_path / "1-again")
    with pytest.raises(UserError, match="2 texts"):
        canary_of_dumps(tmp_path)
    cold = tiny.prefill([first])
    cold.save(tmp_path / "0-cold")
    cold.corrupt(zeros).mask(slots=range(48)).save(tmp_path / "1-again")
    with pytest.raises(UserError, match="first 16 tokens in common"):
        canary_of_dumps(tmp_path)
    cold.corrupt(zeros).mask(slots=range(8)).save(tmp_path / "1-again")
    found = canary_of_dumps(tmp_path)
    assert (found.dumps[1].shared, len(found.failed)) == (40, 1)
