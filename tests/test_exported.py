"""Results as JSON: what the published schema says, whatever the result holds."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pandas as pd
import pytest
import torch

import kvprobe as kv
from kvprobe.app.microscope import Microscope
from kvprobe.app.page import example
from kvprobe.exported import json_schema, plain
from kvprobe.inference.model import Model
from tests.app.made_up import START
from tests.probing.test_claims import planted, probe_features

ROOT = Path(__file__).resolve().parent.parent
CHAT = [{"role": role, "content": f"</script><b>{text}"} for role, text in (("user", "the mill"), ("assistant", "so"))]


@pytest.fixture(scope="module")
def results(tiny_llama: Model) -> dict[str, Any]:
    tokens = tiny_llama.tokens("the mill has 4")[0]
    caches = [tiny_llama.prefill(kv.Tokens.of(ids)) for ids in (tokens.ids, tokens.ids[::-1])]
    features, _ = planted("shared", 3.0)
    patterns = kv.attend(tiny_llama, tokens, caches[0].mask(slots=[2]).rewind(slots=3), queries=[0, -1])
    return {
        "AppState": Microscope(tiny_llama).state(START),
        "Comparison": kv.compare(tiny_llama, CHAT, "m0", "so", policies=["TOVA(8)"], max_new_tokens=2),
        "Probing": probe_features(features, {}, permutations=0, rng=np.random.default_rng(0)),
        "Patterns": patterns,
        "LayerMap": kv.layer_map(tiny_llama, *caches, "so"),
        "PatchMap": kv.patch_sweep(tiny_llama, *caches, "so", kv.LogitDiff(5, 9), ("layer", "slot"), progress=False),
    }


KINDS = [kind["$ref"].rpartition("/")[2] for kind in json_schema()["oneOf"]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_is_of_its_kind_in_the_schema_and_of_no_other(results: dict[str, Any], kind: str):
    written = json.loads(results[kind].to_json())
    jsonschema.validate(written, json_schema())
    assert written["kind"] == kind
    for name in set(written) - {"kind"}:
        less = {key: value for key, value in written.items() if key != name}
        assert not jsonschema.Draft202012Validator(json_schema()).is_valid(less), name
    for other in KINDS:
        definition = {"$ref": f"#/$defs/{other}", "$defs": json_schema()["$defs"]}
        assert jsonschema.Draft202012Validator(definition).is_valid(written) == (other == kind)


def test_the_example_that_the_page_opens_on_is_a_session_of_the_schema():
    jsonschema.validate(example(), {"$ref": "#/$defs/session", "$defs": json_schema()["$defs"]})


def test_findings_of_a_published_run_are_of_the_schema():
    run = ROOT / "docs" / "results" / "runs" / "compaction" / "metrics.json"
    several = {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/finding"}, "$defs": json_schema()["$defs"]}
    jsonschema.validate(json.loads(run.read_text())["findings"], several)


def test_numbers_come_back_as_they_were(results: dict[str, Any]):
    patterns, patched, compared = (results[kind].to_plain() for kind in ("Patterns", "PatchMap", "Comparison"))
    weights = results["Patterns"].weights
    np.testing.assert_allclose(patterns["weights"], weights.numpy(), atol=5e-7)
    assert patterns["queries"] == results["Patterns"].queries.tolist()
    assert patterns["slots"]["live"][2] is False
    assert patched["cells"]["value"] == results["PatchMap"].values.tolist()
    assert [reply["arm"] for reply in compared["replies"]] == [*results["Comparison"].replies]
    assert compared["attention"]["dangling"] == results["Comparison"].attention["dangling"].tolist()
    assert compared["messages"][0]["text"] == CHAT[0]["content"]
    for reply in compared["replies"]:
        assert reply["kl"] == pytest.approx(sum(reply["kls"]) / len(reply["kls"]))


def test_plain_data_holds_what_is_not_finite_as_null():
    frame = pd.DataFrame({"a": [1.0, np.nan], "b": ["x", None]}, index=pd.Index(["p", "q"], name="row"))
    assert plain(frame) == {"row": ["p", "q"], "a": [1.0, None], "b": ["x", None]}
    assert plain({1: torch.tensor([[1.0, torch.inf]]), "at": (True, np.int64(3), pd.NA)}) == {
        "1": [[1.0, None]],
        "at": [True, 3, None],
    }
