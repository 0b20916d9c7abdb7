"""Budgets against published numbers, real models and themselves: sums, searches, units, output."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import kvprobe as kv
from kvprobe.cli import app
from kvprobe.inference.measured import measure
from kvprobe.inference.model import Model
from kvprobe.memory.budget import Budget, budget
from kvprobe.memory.needs import FARTHEST
from kvprobe.memory.sources import shipped_configs
from kvprobe.units import both, bytes_in, short
from tests.commands import kvprobe
from tests.memory import families
from tests.refusals import refused

QWEN = "Qwen/Qwen3-8B"

ENGINES = ["hf", "vllm", "logical"]

# Published numbers


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (QWEN, 147_456),
        ("openai/gpt-oss-120b", 73_728),
        ("deepseek-ai/DeepSeek-V3.1", 70_272),
        ("meta-llama/Llama-3.3-70B-Instruct", 327_680),
        ("meta-llama/Llama-3.1-8B-Instruct", 131_072),
    ],
)
def test_a_token_takes_the_published_bytes(name: str, expected: int):
    assert sum(budget(name, dtype="bfloat16").bytes_per_token) == expected


def test_what_tokens_write_to_states_is_counted_beside_the_states():
    needs = budget("Qwen/Qwen3-Next-80B-A3B-Instruct", context=1000, batch=2, dtype="bfloat16")
    key, value, step, convolved = 16 * 128, 32 * 128, 32, 2 * 16 * 128 + 32 * 128
    token = 2 * (key + value + step + convolved) + 4 * 2 * 32
    assert needs.writes_per_token == [token, token, token, 0] * 12
    assert f"of 36 layers, so that it can be hidden: {token:,} B per token and layer, 2.09 GB here." in str(needs)
    assert "hidden" not in str(budget(QWEN))


@pytest.mark.parametrize("engine", ["hf", "logical"])
def test_a_million_tokens_of_llama_70b_take_328_gb(engine: Any):
    needs = budget("meta-llama/Llama-3.3-70B-Instruct", context=1_000_000, engine=engine)
    assert needs.cache == 327_680_000_000
    assert short(needs.cache) == "327.68 GB"


# What real models hold


@pytest.fixture(scope="module")
def gemma() -> Model:
    return kv.load("gemma3-270m")


@pytest.fixture(params=["smollm2-135m", "gemma3-270m"])
def real(request: pytest.FixtureRequest) -> Model:
    return request.getfixturevalue({"smollm2-135m": "smol", "gemma3-270m": "gemma"}[request.param])


@pytest.mark.parametrize(
    ("real", "prompt"), [("smollm2-135m", 256), ("gemma3-270m", 256), ("gemma3-270m", 600)], indirect=["real"]
)
def test_a_real_model_holds_what_its_budget_says(real: Model, prompt: int):
    """Beyond Gemma's window of 512 tokens, too."""
    predicted = budget(real.name, context=prompt + 2, new=2, dtype="float32")
    measured = measure(real, predicted)
    assert measured.weights == predicted.weights
    assert measured.reading.cache == predicted.generating(0).cache
    assert measured.cache == predicted.cache
    assert measured.generating is not None
    assert measured.reading.peak == pytest.approx(predicted.phases["reading"].total, rel=0.01)
    assert measured.generating.peak == pytest.approx(predicted.phases["generating"].total, rel=0.05)
    assert measured.peak == pytest.approx(predicted.peak, rel=0.001)


@pytest.mark.parametrize("choices", [{"kernel": "eager"}, {"logits": "all"}], ids=str)
def test_eager_attention_and_all_logits_take_what_the_budget_says(real: Model, choices: dict[str, Any]):
    predicted = budget(real.name, context=256, dtype="float32", **choices)
    assert predicted.peak > budget(real.name, context=256, dtype="float32", kernel="sdpa").peak
    assert measure(real, predicted).reading.peak == pytest.approx(predicted.phases["reading"].total, rel=0.01)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"engine": "logical"}, "Only transformers'"),
        ({"policy": "TOVA(8)"}, "Only transformers'"),
        ({"dtype": "bfloat16"}, "is of bfloat16, but"),
    ],
    ids=str,
)
def test_only_what_transformers_itself_holds_is_measured(tiny_llama: Model, choices: dict[str, Any], said: str):
    refused(lambda: measure(tiny_llama, budget(tiny("llama"), context=8, **{"dtype": "float32", **choices})), said)


# A fresh process


def in_a_fresh_process(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", shipped_configs())
def test_every_config_that_ships_has_a_budget_under_every_engine(name: str):
    for engine in ENGINES:
        needs = budget(name, engine=engine)
        assert needs.peak > 0
        assert needs.config.name in str(needs)


def test_a_mistake_is_answered_without_torch():
    done = in_a_fresh_process(
        "import sys\n"
        "from kvprobe.memory.budget import budget\n"
        "for mistake in ("
        "    {'memory': '24G'}, {'dtype': 'int3'}, {'cache_dtype': 'fp3'}, {'context': 5, 'new': 5},"
        "    {'cache_dtype': 'nvfp4'}, {'cache_dtype': 'int4', 'engine': 'vllm'}"
        "):\n"
        "    try:\n"
        "        budget('Qwen/Qwen3-8B', **mistake)\n"
        "    except ValueError:\n"
        "        continue\n"
        "    sys.exit('not refused')\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pandas', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    assert done.returncode == 0, done.stderr


def test_a_budget_is_the_same_as_kv_budget():
    assert kv.budget is budget
    assert kv.Budget is Budget


# Sums


def tiny(name: str) -> dict[str, Any]:
    """The config of a tiny model of this family, with the fields that say how many weights it has."""
    return {**families.settings(name), "n_shared_experts": 1, "altup_num_inputs": 2}


policies = st.sampled_from([None, "TOVA(9)", "SinkWindow(2, 6)", "LayerBudgets(SnapKV(8, 2))", "TOVA(5, every=3)"])
names = st.sampled_from(sorted(families.TINY))
engines = st.sampled_from(ENGINES)


@st.composite
def asked(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tiny model of any family, and what may be asked of its budget."""
    engine = draw(engines)
    new = draw(st.integers(0, 7))
    choices: dict[str, Any] = {
        "engine": engine, "new": new, "context": new + draw(st.integers(1, 60)), "batch": draw(st.integers(1, 4)),
        "dtype": draw(st.sampled_from(["float32", "bfloat16"])), "source": draw(st.integers(0, 5)),
    }  # fmt: skip
    if engine == "vllm":
        choices |= {"block": draw(st.sampled_from([4, 16])), "batched_tokens": draw(st.sampled_from([1, 32, 8192]))}
        choices |= {"cache_dtype": draw(st.sampled_from([None, "fp8"]))}
    else:
        choices |= {"policy": draw(policies), "kernel": draw(st.sampled_from([None, "sdpa", "eager"]))}
        choices |= {"logits": draw(st.sampled_from(["last", "all"]))}
    return tiny(draw(names)), choices


@given(drawn=asked())
@settings(max_examples=60)
def test_layers_add_up_to_the_whole(drawn: tuple[dict[str, Any], dict[str, Any]]):
    needs = budget(drawn[0], **drawn[1])
    padding = needs.cache - sum(needs.allocated)
    assert padding >= 0
    assert padding == 0 or needs.engine == "vllm"
    assert needs.peak == needs.weights + max(
        phase.cache + phase.activations + phase.logits + phase.growth for phase in needs.phases.values()
    )
    assert all(part >= 0 for phase in needs.phases.values() for part in (phase.cache, phase.activations, phase.growth))
    assert all(generated <= held for generated, held in zip(needs.generated, needs.allocated, strict=True))


def test_slots_that_a_window_keeps_are_generated_once_it_has_moved_past_the_prompt():
    needs = budget("smollm2-135m", context=8192, new=4096, policy="SlidingWindow(1024)", engine="logical")
    assert needs.generated == needs.allocated
    assert sum(budget("smollm2-135m", context=8192, new=512, policy="SlidingWindow(1024)").generated) * 2 == needs.cache


def test_what_costs_memory_costs_it_at_the_peak_too():
    text = str(budget("smollm2-135m", context=8192, dtype="bfloat16", cache_dtype="float32", engine="logical"))
    [line] = [line for line in text.splitlines() if "costs" in line]
    assert "-" not in line.split(" of cache ")[1]


@given(drawn=asked())
@settings(max_examples=60)
def test_transformers_never_holds_less_than_a_query_may_read(drawn: tuple[dict[str, Any], dict[str, Any]]):
    needs = budget(drawn[0], **{**drawn[1], "engine": "hf", "cache_dtype": None, "block": 16, "batched_tokens": 32})
    assert all(held >= read for held, read in zip(needs.allocated, needs.logical, strict=True))


@given(drawn=asked(), more=st.integers(0, 50), rows=st.integers(0, 3))
@settings(max_examples=60)
def test_more_tokens_or_conversations_never_need_less(
    drawn: tuple[dict[str, Any], dict[str, Any]], more: int, rows: int
):
    fields, choices = drawn
    less = budget(fields, **choices)
    for changed in ({"context": choices["context"] + more}, {"batch": choices["batch"] + rows}):
        greater = budget(fields, **{**choices, **changed})
        assert greater.cache >= less.cache
        assert greater.peak >= less.peak
        assert greater.weights == less.weights


@given(drawn=asked())
@settings(max_examples=30)
def test_the_logical_view_of_a_policy_is_never_more_than_that_of_none(drawn: tuple[dict[str, Any], dict[str, Any]]):
    needs = budget(drawn[0], **drawn[1])
    assert all(
        with_it <= without
        for with_it, without in zip(needs.logical, needs.without_policy.without_format.logical, strict=True)
    )


# Searches


def memory_for(needs: Budget, share: float) -> int:
    """A memory at which a search has work to do: sometimes less than the weights, else up to thirty times what is
    needed beside them."""
    if share < 0.05:
        return needs.weights // 2
    return needs.weights + int((needs.peak - needs.weights) * (0.2 + 30 * share**2))


shares = st.floats(0, 1)


@given(drawn=asked(), share=shares, places=st.lists(st.floats(0, 1), min_size=4, max_size=4))
@settings(max_examples=30)
def test_the_largest_context_fits_with_all_shorter_ones_and_one_token_more_does_not(
    drawn: tuple[dict[str, Any], dict[str, Any]], share: float, places: list[float]
):
    needs = budget(drawn[0], **drawn[1])
    needs = budget(drawn[0], **drawn[1], memory=memory_for(needs, share))
    assert needs.usable is not None
    largest, least = needs.largest_context, drawn[1]["new"] + 1
    if largest is None:
        assert needs.at(FARTHEST // 2).peak <= needs.usable
        return
    assert needs.at(max(least, largest + 1)).peak > needs.usable
    assert largest == 0 or largest >= least
    for place in [*places, 1.0] if largest else []:
        assert needs.at(least + int((largest - least) * place)).peak <= needs.usable


@given(drawn=asked(), share=shares, places=st.lists(st.floats(0, 1), min_size=4, max_size=4))
@settings(max_examples=30)
def test_the_largest_batch_fits_with_all_smaller_ones_and_one_conversation_more_does_not(
    drawn: tuple[dict[str, Any], dict[str, Any]], share: float, places: list[float]
):
    fields, choices = drawn
    memory = memory_for(budget(fields, **choices), share)
    largest = budget(fields, **choices, memory=memory).largest_batch
    if largest is None:
        assert budget(fields, **{**choices, "batch": FARTHEST // 2}, memory=memory).fits()
        return

    def room(batch: int) -> int:
        headroom = budget(fields, **{**choices, "batch": batch}, memory=memory).headroom
        assert headroom is not None
        return headroom

    assert room(largest + 1) < 0
    for place in [*places, 1.0] if largest else []:
        assert room(1 + int((largest - 1) * place)) >= 0


def before_it_runs_out(peaks: list[int], memory: int) -> int:
    """How many lengths in a row fit, from the first on, of what is needed at each."""
    return next(length for length, peak in enumerate(peaks) if peak > memory)


@pytest.mark.parametrize(
    ("name", "choices", "far"),
    [
        ("llama", {"engine": "logical"}, 40),
        ("llama", {"engine": "logical", "policy": "TOVA(5, every=3)"}, 12),
        ("llama", {"engine": "logical", "policy": "SlidingWindow(4, every=50)"}, 120),
        ("llama", {"engine": "logical", "policy": "SnapKV(8, 2)"}, 40),
        ("llama", {"engine": "logical", "policy": "LayerBudgets(TOVA(8, every=7))"}, 30),
        ("llama", {"engine": "logical", "policy": "Quantise(4, 8, 6)"}, 60),
        ("llama", {"engine": "logical", "policy": "Quantise(2, 8, 4, every=13)"}, 60),
        ("gemma2", {"engine": "logical", "policy": "SlidingWindow(9, every=20)"}, 50),
        ("llama", {"engine": "hf"}, 40),
        ("llama", {"engine": "hf", "policy": "SlidingWindow(4, every=50)"}, 120),
        ("gemma2", {"engine": "hf"}, 40),
        ("llama", {"engine": "hf", "cache_dtype": "int4"}, 140),
        ("llama", {"engine": "vllm", "block": 4}, 40),
    ],
    ids=str,
)
def test_the_most_generated_tokens_fit_at_every_step(name: str, choices: dict[str, Any], far: int):
    asked = {"context": 16, "dtype": "float32", **choices}
    needs = budget(tiny(name), **asked)
    peaks = [needs.generating(new).peak for new in range(far)]
    for memory in sorted({peaks[0], *peaks[:: 1 + far // 9]} - {max(peaks)}):
        # vLLM takes only a part of the memory.
        room = memory if needs.engine != "vllm" else -(-memory * 100 // 92)
        limited = budget(tiny(name), **asked, memory=room)
        assert limited.usable is not None
        assert limited.largest_new == max(0, before_it_runs_out(peaks, limited.usable) - 1), memory


@given(
    new=st.integers(0, 8), group=st.sampled_from([1, 4, 8]), tail=st.integers(0, 12), bits=st.integers(1, 4),
    every=st.sampled_from([1, 3, None]), which=st.floats(0, 0.99),
)  # fmt: skip
@settings(max_examples=20)
def test_with_rounding_in_groups_the_largest_context_is_where_it_first_runs_out(
    new: int, group: int, tail: int, bits: int, every: int | None, which: float
):
    choices: dict[str, Any] = {
        "engine": "logical",
        "policy": f"Quantise({bits}, {group}, {tail}, every={every})",
        "new": new,
    }
    needs = budget(tiny("llama"), context=new + 1, **choices)
    peaks = [needs.at(context).peak for context in range(new + 1, new + 50)]
    memory = peaks[int(which * len(peaks))]
    assume(memory < max(peaks))
    expected = before_it_runs_out(peaks, memory)
    assert budget(tiny("llama"), context=new + 1, **choices, memory=memory).largest_context == (new + expected or 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_searches_agree_with_the_budget_they_began_at(engine: Any):
    for memory in ("1GB", "20GB", "40GB", "80GB"):
        needs = budget(QWEN, engine=engine, context=20_000, batch=3, memory=memory)
        assert needs.largest_context is not None
        assert needs.largest_batch is not None
        assert needs.headroom is not None
        assert (needs.headroom >= 0) == needs.fits() == (needs.largest_context >= 20_000) == (needs.largest_batch >= 3)


def test_without_a_memory_nothing_is_searched():
    needs = budget(QWEN)
    assert (needs.memory, needs.usable, needs.headroom) == (None, None, None)
    assert (needs.largest_context, needs.largest_batch, needs.largest_new) == (None, None, None)


def test_a_sliding_window_has_no_largest_context():
    needs = budget("mistralai/Mistral-7B-v0.1", engine="logical", memory="16GB")
    assert needs.largest_context is None
    assert needs.largest_batch is not None


def test_a_context_needs_at_least_one_token_of_prompt():
    refused(lambda: budget(QWEN, context=8, new=4).at(4), "at least 5")


# Memory and units


def test_headroom_is_what_the_engine_may_use_less_the_peak():
    for engine, usable in (("hf", 80 * 10**9), ("logical", 80 * 10**9), ("vllm", 73_600_000_000)):
        needs = budget(QWEN, engine=engine, memory="80GB")
        assert needs.usable == usable
        assert needs.headroom == usable - needs.peak


def test_ranks_share_the_weights():
    whole, shared = (budget(QWEN, engine="vllm", ranks=ranks) for ranks in (1, 8))
    assert shared.weights == -(-whole.weights // 8)
    assert shared.cache * 8 == whole.cache


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GB", 24 * 10**9),
        ("24GiB", 24 * 2**30),
        (" 24 gib ", 24 * 2**30),
        ("0.5TB", 5 * 10**11),
        ("1.5 KiB", 1536),
        ("80MB", 8 * 10**7),
        ("12B", 12),
        (12, 12),
    ],
)
def test_a_memory_is_bytes_or_a_number_with_its_unit(text: str | int, expected: int):
    assert bytes_in(text, "memory") == expected
    assert budget(QWEN, memory=text).memory == expected


@pytest.mark.parametrize(
    "text",
    ["24G", "24", "24 Gi", "GB", "", "-24GB", "24,5GB", "1e9B", "nanGB", "24GBs",
      "0GB", "24GB 24GB", "9" * 400 + "B", 0, -5, 10**400],
    ids=lambda text: str(text)[:10],
)  # fmt: skip
@pytest.mark.parametrize("name", ["memory", "weights"])
def test_a_memory_without_its_unit_or_beyond_all_bounds_is_refused_in_a_sentence(name: str, text: str | int):
    refused(lambda: budget(QWEN, **{name: text}, engine="vllm"), f"{name}")


@given(count=st.integers(-(10**16), 10**16))
def test_bytes_are_shown_within_half_a_percent(count: int):
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    binary = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
    number, unit = short(count).split(" ")
    assert float(number) * units[unit] == pytest.approx(count, rel=0.005)
    shown = re.fullmatch(r"(-?[\d.]+) (\w+) \((-?[\d.]+) (\w+)\)", both(count))
    if shown is None:
        assert both(count) == f"{count} B"
        assert abs(count) < 1000
        return
    assert float(shown[1]) * units[shown[2]] == pytest.approx(count, rel=0.005)
    assert float(shown[3]) * binary[shown[4]] == pytest.approx(count, rel=0.006)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        *[({name: value}, name) for name in ("context", "batch", "ranks", "block", "batched_tokens")
          for value in (0, -1, True, 1.5, "8", None, 2**35)],
        *[({name: value}, name) for name in ("new", "source") for value in (-1, True, 1.5, "8", None, 2**35)],
        ({"context": 8, "new": 8}, "at least 9"),
        ({"engine": "VLLM"}, "vllm"),
        ({"engine": None}, "vllm"),
        ({"kernel": "flash"}, "sdpa"),
        ({"logits": "first"}, "last"),
        ({"ranks": 2}, "vLLM"),
        ({"ranks": 2, "engine": "logical"}, "vLLM"),
        ({"dtype": "fp8"}, "fp8"),
        ({"dtype": "bfloat"}, "bfloat16"),
        ({"cache_dtype": "int5"}, "int4"),
        ({"cache_dtype": ""}, "float32"),
        ({"policy": "Sliding(8)"}, "SlidingWindow"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_in_a_sentence(choices: dict[str, Any], said: str, unchecked: None):
    refused(lambda: budget(QWEN, **choices), said)


# The command


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    command, bound, _ = app.parse_args(["budget", *arguments])
    command(*bound.args, **bound.kwargs)
    return capsys.readouterr().out


ASKED: list[tuple[list[str], dict[str, Any]]] = [
    ([QWEN], {}),
    (["google/gemma-3-27b-it", "--engine", "vllm", "--memory", "80GB", "--context", "131072"],
     {"engine": "vllm", "memory": "80GB", "context": 131_072}),
    (["gemma3-270m", "--new", "20", "--batch", "3", "--memory", "24GiB", "--kernel", "eager", "--logits", "all"],
     {"new": 20, "batch": 3, "memory": "24GiB", "kernel": "eager", "logits": "all"}),
    ([QWEN, "--policy", "LayerBudgets(SnapKV(64))", "--engine", "logical", "--dtype", "float32", "--context", "100"],
     {"policy": "LayerBudgets(SnapKV(64))", "engine": "logical", "dtype": "float32", "context": 100}),
    ([QWEN, "--cache-dtype", "int4", "--weights", "5GB", "--memory", "6GB"],
     {"cache_dtype": "int4", "weights": "5GB", "memory": "6GB"}),
    ([QWEN, "--engine", "vllm", "--ranks", "4", "--block", "32", "--batched-tokens", "512", "--source", "7"],
     {"engine": "vllm", "ranks": 4, "block": 32, "batched_tokens": 512, "source": 7}),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "choices"), ASKED, ids=str)
def test_the_command_prints_the_budget(
    arguments: list[str], choices: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    assert printed(capsys, *arguments) == f"{budget(arguments[0], **choices)}\n"


@pytest.mark.parametrize(("arguments", "choices"), ASKED, ids=str)
def test_its_json_has_the_numbers_of_the_budget_and_of_its_table(
    arguments: list[str], choices: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    table, needs = printed(capsys, *arguments), budget(arguments[0], **choices)
    numbers = json.loads(printed(capsys, *arguments, "--json"))
    for name in ("weights", "peak", "headroom", "parameters", "usable", "memory", "largest_context", "largest_batch"):
        assert numbers[name] == getattr(needs, name)
    assert numbers["allocated"] == needs.cache
    assert [layer["allocated"] for layer in numbers["layers"]] == needs.allocated
    assert [layer["logical"] for layer in numbers["layers"]] == needs.logical
    assert numbers["logical"] == sum(layer["logical"] for layer in numbers["layers"])
    assert numbers["bytes_per_token"] == sum(layer["bytes_per_token"] for layer in numbers["layers"])
    phase = numbers["moments"][numbers["moment"]]
    assert numbers["peak"] == numbers["weights"] + sum(phase.values())

    lines = {line[:44].strip(): line for line in table.splitlines()}
    whole = next(line for line in table.splitlines() if line.startswith("all layers"))
    for shown in (f"{numbers['bytes_per_token']:,}", short(numbers["logical"]), short(numbers["allocated"])):
        assert shown in whole
    assert both(numbers["peak"]) in lines["peak"]
    assert any(name.startswith("weights") and both(numbers["weights"]) in line for name, line in lines.items())
    if numbers["headroom"] is not None:
        assert (
            both(abs(numbers["headroom"]))
            in lines["headroom" if numbers["headroom"] >= 0 else "DOES NOT FIT: short of"]
        )
        assert f"{numbers['largest_context']:,} tokens" in lines["largest context"]
        assert f"{numbers['largest_batch']:,} at once" in lines["largest batch"]


def test_layers_that_are_alike_are_one_row_of_the_table():
    table = str(budget("google/gemma-3-27b-it", context=131_072))
    (sliding,) = (line for line in table.splitlines() if "sliding 1,024" in line)
    (full,) = (line for line in table.splitlines() if "GQA 32:16  " in line)
    assert "52 × " in sliding
    assert "10 × " in full
    assert f"{52 * 8192:,}" in sliding
    assert f"{10 * 8192:,}" in full


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"context": 50_000}, "trained for 40,960 tokens"),
        ({"engine": "vllm"}, "estimate"),
        ({"policy": "TOVA(64)"}, "TOVA(64) saves"),
        ({"cache_dtype": "fp8", "engine": "logical"}, "50.0 %"),
        ({"memory": "1GB"}, "DOES NOT FIT"),
    ],
    ids=str,
)
def test_the_table_remarks_on_what_a_reader_must_know(choices: dict[str, Any], said: str):
    assert said in str(budget(QWEN, **choices))
    assert said not in str(budget(QWEN))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["smollm2-135"], "smollm2-135m"),
        ([QWEN, "--memory", "24G"], "24GiB"),
        ([QWEN, "--policy", "SinkWindw(4, 60)"], "SinkWindow"),
        ([QWEN, "--engine", "vllm", "--cache-dtype", "int4"], "int4"),
        (["owner/absent"], "owner/absent"),
        (["x" * 5000], "xxxx"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], said: str):
    done = kvprobe("budget", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("kvprobe: ")
    assert done.stderr.count("\n") == 1
    assert said in done.stderr
    assert not done.stdout
