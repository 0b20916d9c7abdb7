"""A run says how its model is loaded and reads, gives the same rows for it, and is found again by the same settings."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from kvprobe.errors import UserError
from kvprobe.experiments.parts import Parts
from kvprobe.experiments.reproduce import flags
from kvprobe.experiments.running import begin
from kvprobe.experiments.settings import Settings, as_mapping, from_mapping
from kvprobe.experiments.work import Work
from kvprobe.inference.elsewhere import SameModel
from kvprobe.inference.model import Model, load
from kvprobe.models.lanes import Lanes
from kvprobe.studies import find, robustness
from kvprobe.text.tokens import Tokens
from tests.models import llama, tiny_tokenizer
from tests.refusals import refused

CHUNK = 3
PLACED: dict[str, Any] = {"max_memory": ("cpu=60KB",), "chunk": CHUNK}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Of a model in several files."""
    folder = tmp_path_factory.mktemp("model")
    model = llama(tokenizer=tiny_tokenizer())
    model.lanes.plain.save_pretrained(folder, max_shard_size="40KB")
    model.tokenizer.save_pretrained(folder)
    return Settings(model=str(folder))


def measure(model: Model, config: Settings, number: int) -> Iterator[dict[str, float]]:
    """A prompt that is read whole and after a part of it is masked, and what is generated then."""
    read = Tokens.of(list(range(5 + number, 18 + number)))
    cache = model.prefill(read[:8])
    reply = model.generate(cache.mask(slots=[2]), " the house", max_new_tokens=3, stop=())
    logits = model.extend(cache, read[8:], logits=2)[1]
    yield {"value": float(logits.norm()), **{f"token {place}": token for place, token in enumerate(reply.tokens[0])}}


def measured(config: Settings, root: Path, processes: int = 1) -> pd.DataFrame:
    with begin("placed", config, root, None) as (model, run):
        parts = Parts(model, config, replace(run, processes=processes))
        return parts.table(measure, [0, 1, 2], "rows", doing="Asking", unit="prompt")


def test_rows_are_the_same_with_weights_on_disk_and_prompts_in_chunks(
    config: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole, read, forward = measured(config, tmp_path), list[int](), Lanes.forward

    def counted(lanes: Lanes, ids: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
        read.append(ids.shape[1])
        return forward(lanes, ids, *given, **named)

    monkeypatch.setattr(Lanes, "forward", counted)
    asked = replace(config, **PLACED)
    pd.testing.assert_frame_equal(measured(asked, tmp_path), whole, rtol=1e-4)
    assert max(read) == CHUNK
    pd.testing.assert_frame_equal(measured(asked, tmp_path / "forked", processes=2), whole, rtol=1e-4)
    monkeypatch.setattr(Work, "write", lambda *_: pytest.fail("a case is measured again"))
    with begin("placed", asked, tmp_path, None) as (model, run):
        assert {weight.device.type for weight in model.lanes.plain.parameters()} == {"cpu", "meta"}
        written = run.config["settings"]
    assert written.items() >= {"max_memory": ["cpu=60KB"], "chunk": CHUNK}.items()
    assert from_mapping(Settings, written) == asked
    measured(from_mapping(Settings, written), tmp_path)
    assert as_mapping(config).keys() == {"model", "seed", "device", "dtype"}


def test_rounded_weights_are_rounded_again_for_workers_and_for_the_same_command(
    config: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = robustness.Config(model=config.model, quantization="int8", chunk=CHUNK)
    assert flags(asked)[-2:] == ["--quantization int8", f"--chunk {CHUNK}"]
    with begin("robustness", asked, tmp_path, None) as (model, run):
        assert run.environment["device"] == "cpu, float32, weights in int8 by quanto"
    elsewhere = SameModel.of(model)()
    assert (elsewhere.fingerprint, elsewhere.lanes.chunk) == (model.fingerprint, CHUNK)
    # With the model in hand, settings say how that was loaded, whatever they said before.
    begun = list[Settings]()

    def stop(_: str, config: Settings, *others: object) -> None:
        begun.append(config)
        raise UserError("Far enough.")

    monkeypatch.setattr("kvprobe.experiments.running.begin", stop)
    refused(lambda: find("robustness").run(robustness.Config(**PLACED), tmp_path, model=model), "Far enough.")
    assert begun == [asked]


@pytest.mark.parametrize(
    ("placed", "said"),
    [
        ({"device_map": "auto", "device": "cpu"}, "device and device_map both say"),
        ({"device_map": "atuo"}, "'auto', 'balanced'"),
        ({"offload_folder": "here"}, "offload_folder is for weights that device_map puts on disk"),
        ({"quantization": "int8", "max_memory": ["cpu=1GB"]}, "leave out device_map and max_memory"),
        ({"max_memory": ["1GB"]}, "write a device and a size"),
        ({"max_memory": ["cpu=much"]}, "The max_memory is 'much'"),
        ({"chunk": 0}, "'chunk' is 0; expected at least 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_loaded(placed: dict[str, Any], said: str):
    refused(lambda: from_mapping(Settings, placed), said)


def test_what_is_watched_is_read_at_once(config: Settings):
    whole, pieces = load(config.model), load(config.model, chunk=2)
    seen, same = (model.watch(list(range(5, 18)), queries=3) for model in (whole, pieces))
    assert seen.attention is not None
    assert same.attention is not None
    assert torch.equal(seen.attention.recent, same.attention.recent)
    assert torch.equal(seen.attention.total, same.attention.total)
    refused(lambda: load(whole, chunk=2), "This model is loaded already")
