"""A model in bfloat16 whose weights lie in memory, partly on disk, or in 8 bits: what each takes beside its budget.

Each arm is a process of its own. It loads the model, reads two prompts, hides slots and patches others, goes on from
there, and adds a LoRA adapter. Asserted: the arm with weights on disk gives the logits of the whole model to the bit
and reads its cache; caches of whole and rounded weights, with and without the adapter, refuse each other; and no peak
lies above its budget, or below it, by more than `LIMIT`.

Measured is what a process has of its own (RssAnon, Linux): pages of mapped files, such as those of weights that are
read from disk, can be dropped whenever memory is short. The parent reads it every few milliseconds. What the process
had before, after the same steps with a small random model of the same class, is subtracted. Freed memory is given back
at once (MALLOC_MMAP_THRESHOLD_).

The gate takes minutes for a large model in bfloat16 on a CPU without AVX-512. It passes on the small model alone unless
--gate is given; one pass in float32, as the gate makes them, has the peak of its proof.

    python benchmarks/big_model.py [--model qwen2.5-coder-1.5b] [--shard 500MB] [--memory 1.5GiB] [--tokens 32]
        [--gate]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

import kvprobe as kv
from kvprobe.inference.room import loading_bytes
from kvprobe.models.lanes import Lanes
from kvprobe.models.loading import opened, resolve_folder
from kvprobe.models.placing import Placing
from kvprobe.models.rounding import in_float32
from kvprobe.units import both

ARMS = ("whole", "disk", "int8")
LIMIT = 0.1
LOADING, WORKING = "load and proof", "read, mask, patch, go on"
HIDDEN, PATCHED, RANK = [3, 4, 5], [8, 9], 4
LORA = "model.layers.1.self_attn.v_proj"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--memory", default="1.5GiB", help="for weights, where some lie on disk")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--shard", metavar="SIZE", help="write the weights in pieces of at most this size first")
    parser.add_argument("--gate", action="store_true", help="prove the model itself, not a small one of its class")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.arm:
        work(arguments)
        return
    print(f"{arguments.model} in bfloat16, prompts of {arguments.tokens} tokens; {where()}")
    print(f"{'arm':8}{'moment':28}{'budget':>28}{'measured':>28}{'off by':>10}")
    worst = 0.0
    with TemporaryDirectory() as folder:
        model = arguments.model
        if arguments.shard:
            model = sharded(resolve_folder(model), Path(folder) / "sharded", arguments.shard)
        for arm in ARMS:
            command = [*sys.argv, "--model", str(model), "--arm", arm, "--folder", folder]
            found, peaks, seconds = watched(command, mapped(arm, arguments.shard))
            for moment in (LOADING, WORKING):
                error = found["budgets"][moment] / peaks[moment] - 1
                if not (arguments.shard and arm == "int8"):
                    worst = max(worst, abs(error))
                sizes = (both(size) for size in (found["budgets"][moment], peaks[moment]))
                print(f"{arm:8}{moment:28}{''.join(f'{size:>28}' for size in sizes)}{100 * error:>+8.1f} %")
            print(f"{'':8}{found['remark']}; {seconds:.0f} s, {found['cpu']:.0f} s of CPU", flush=True)
    assert worst <= LIMIT, f"a budget is off by {worst:.0%}"


def sharded(source: Path, folder: Path, size: str) -> Path:
    """A model in bfloat16 whose weights lie in several files."""
    plain = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    plain.save_pretrained(folder, max_shard_size=size)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    files = len([*folder.glob("model-*.safetensors")])
    assert files > 1, f"{size} is no less than all weights; give less"
    print(f"weights in {files} files")
    return folder


def where() -> str:
    """Machine and versions."""
    packages = ", ".join(f"{package.__name__} {package.__version__}" for package in (torch, transformers, kv))
    name = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.processor(),
    )
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {len(os.sched_getaffinity(0))} cores, {packages}"


def mapped(arm: str, shard: str | None) -> tuple[str, ...]:
    """Which memory counts. Weights in pieces lie in pages of their files, as they are in the dtype of these. Of rounded
    ones these pages can be dropped but for what is not rounded, which nobody can tell apart: so of these only what the
    process has of its own is given, and is not held against the budget."""
    return ("RssAnon", "RssFile") if shard and arm != "int8" else ("RssAnon",)


def watched(command: list[str], kinds: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, int], float]:
    """What an arm reports, its peak in each of its moments above what it had before the first, and its seconds."""
    start, peaks, moment, found = time.perf_counter(), dict[str, int](), "", dict[str, Any]()
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONWARNINGS": "ignore"}
    arm = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environment)
    assert arm.stdout is not None
    lines = arm.stdout

    def listen() -> None:
        nonlocal moment, found
        for line in lines:
            if line.startswith("{"):
                found = json.loads(line)
            else:
                moment, begun = line.strip(), own_bytes(arm.pid, kinds)
                peaks.setdefault(moment, begun)

    listener = Thread(target=listen)
    listener.start()
    while arm.poll() is None:
        peaks[moment] = max(peaks.get(moment, 0), own_bytes(arm.pid, kinds))
        time.sleep(0.004)
    listener.join()
    if arm.returncode:
        sys.exit(f"This arm failed: {' '.join(command)}")
    return found, {name: most - found["before"] for name, most in peaks.items()}, time.perf_counter() - start


def own_bytes(process: int | str, kinds: tuple[str, ...]) -> int:
    """Memory of a process of these kinds; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(kinds))


def work(arguments: argparse.Namespace) -> None:
    """One arm, which names its moments as they begin."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.utils.logging.disable_progress_bar()
    sizes = {"cpu": arguments.memory}
    placing = {"whole": Placing(), "disk": Placing(max_memory=sizes), "int8": Placing(quantization="int8")}[
        arguments.arm
    ]
    source = resolve_folder(arguments.model)
    small = proved_small(source, arguments.folder / "small", placing)
    steps(small, 16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)  # torch has no part in its memory
    before = own_bytes("self", mapped(arguments.arm, arguments.shard))
    del tokenizer

    print(LOADING, flush=True)
    plain, tokenizer, name = opened(str(source), "auto", "bfloat16", placing)
    lanes = Lanes(plain, tokenizer) if arguments.gate else Lanes(plain, tokenizer).proved_as(small.lanes)
    model = kv.Model(lanes, name)
    if arguments.gate:
        assert lanes.masks_by_head is not None
    else:
        with torch.no_grad():
            in_float32(plain)(torch.arange(5, 21)[None], use_cache=False)
    loading = loading_bytes(source, torch.bfloat16, placing)

    print(WORKING, flush=True)
    cache, logits = steps(model, arguments.tokens)
    needs = model.budget(context=arguments.tokens)
    print("agreement", flush=True)
    remark = agreement(arguments, model, cache, logits)
    budgets = {LOADING: loading, WORKING: needs.peak}
    print(json.dumps({"before": before, "budgets": budgets, "remark": remark, "cpu": time.process_time()}), flush=True)


def proved_small(source: Path, folder: Path, placing: Placing) -> kv.Model:
    """A small random model of the class of the one in a folder, placed likewise, after it has passed the gate."""
    if not folder.exists():
        config: Any = transformers.AutoConfig.from_pretrained(source)
        config.update({"hidden_size": 32 * config.num_attention_heads, "intermediate_size": 64, "vocab_size": 256})
        config.update({"num_hidden_layers": 3, "head_dim": 32, "max_window_layers": 3})
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:3]
        config.update({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0})
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    if placing.mapped:
        return kv.load(folder, dtype="bfloat16", max_memory={"cpu": "200KB"})
    return kv.load(folder, dtype="bfloat16", quantization=placing.quantization)


def steps(model: kv.Model, tokens: int) -> tuple[kv.KVCache, torch.Tensor]:
    """The cache of a prompt of which slots are hidden and others come from another prompt; the logits after it."""
    draw = torch.Generator().manual_seed(0)
    ids, other, more = (torch.randint(5, 250, (count,), generator=draw).tolist() for count in (tokens, tokens, 3))
    cache = model.prefill(ids).mask(slots=HIDDEN).patch(model.prefill(other), slots=PATCHED)
    return cache, model.extend(cache, more)[1].float()


def agreement(arguments: argparse.Namespace, model: kv.Model, cache: kv.KVCache, logits: torch.Tensor) -> str:
    """What the arm shares with the whole model and with itself under an adapter, in words; raises where it does not."""
    kept, seen = arguments.folder / "cache.safetensors", arguments.folder / "logits.safetensors"
    if arguments.arm == "whole":
        cache.save(kept)
        save_file({"logits": logits, "fingerprint": letters(model.fingerprint)}, seen)
        lora(arguments.folder / "adapter", model)
    whole = load_file(seen)
    tuned = model.adapted(arguments.folder / "adapter")
    tuned_cache, tuned_logits = steps(tuned, arguments.tokens)
    assert not torch.equal(logits, tuned_logits)
    for one, other in ((model, tuned_cache), (tuned, cache)):
        refused(lambda one=one, other=other: one.extend(other, [7]))
    if arguments.arm == "int8":
        refused(lambda: model.extend(kv.KVCache.load(kept), [7]))
        error = (logits - whole["logits"]).abs().max() / whole["logits"].abs().max()
        same = "the same" if torch.equal(logits.argmax(-1), whole["logits"].argmax(-1)) else "another"
        return f"logits off by {error:.3f} of the largest of the whole model, {same} top token; caches refused"
    assert torch.equal(letters(model.fingerprint), whole["fingerprint"])
    assert torch.equal(logits, whole["logits"])
    if arguments.arm == "whole":
        return "caches with and without the adapter refuse each other"
    assert torch.equal(model.extend(kv.KVCache.load(kept), [7])[1], model.extend(cache, [7])[1])
    weights = [*model.lanes.plain.parameters()]
    share = sum(weight.numel() for weight in weights if weight.is_meta) / sum(weight.numel() for weight in weights)
    return f"{share:.0%} of the weights on disk; logits equal to the bit, and the whole model's cache is read"


def letters(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()))


def lora(folder: Path, model: kv.Model) -> None:
    """A LoRA adapter of random weights, of one matrix."""
    weight, draw = model.lanes.plain.get_parameter(f"{LORA}.weight"), torch.Generator().manual_seed(1)
    sides = {"A": (RANK, weight.shape[1]), "B": (weight.shape[0], RANK)}
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "base_model_name_or_path": "", "bias": "none"}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    tensors = {side: torch.randn(shape, generator=draw) for side, shape in sides.items()}
    named = {f"base_model.model.{LORA}.lora_{side}.weight": tensor for side, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")


def refused(go_on: Callable[[], object]) -> None:
    try:
        go_on()
    except kv.UserError as error:
        if "differs in weights" in str(error):
            return
        raise
    raise AssertionError("A cache of other weights was read.")


if __name__ == "__main__":
    main()
