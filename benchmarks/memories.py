"""Models of 100 M random parameters with each kind of memory, end to end, beside transformers and beside each other.

    python benchmarks/memories.py

A Llama (K and V), a DeepSeek V3 (latents) and a Qwen3.5 (three recurrent layers to one that attends) read a text, and
go on token by token, by kvprobe and by transformers, with equal logits; then a turn is hidden and compared, a map is
patched, attention is drawn and the memory is budgeted. Each model has a process of its own, so that memory is its own.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from timing import paired
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.llama import LlamaConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig

import kvprobe as kv
from kvprobe.training.words import word_tokenizer

WORDS = ("<unk>", "<bos>", "<end>", *(f"w{number}" for number in range(4093)))
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ ' ' + message['content'] }} <end>{% endfor %}"
    "{% if add_generation_prompt %} w0{% endif %}"
)
SHARED: dict[str, Any] = {
    "vocab_size": len(WORDS), "hidden_size": 768, "num_hidden_layers": 12, "max_position_embeddings": 4096,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "Llama": lambda: LlamaConfig(
        **SHARED, intermediate_size=2560, num_attention_heads=12, num_key_value_heads=4, head_dim=64
    ),
    "DeepSeek V3": lambda: DeepseekV3Config(
        **SHARED, intermediate_size=2560, first_k_dense_replace=12, num_attention_heads=12, num_key_value_heads=12,
        q_lora_rank=384, kv_lora_rank=256, qk_rope_head_dim=32, qk_nope_head_dim=64, v_head_dim=64,
    ),
    "Qwen3.5": lambda: Qwen3_5TextConfig(
        **SHARED, intermediate_size=2304, num_attention_heads=12, num_key_value_heads=4, head_dim=64,
        linear_num_key_heads=6, linear_num_value_heads=12, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
}  # fmt: skip
BOUND = 1e-4
"""By which logits may differ, relative to the largest."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kind", choices=CONFIGS)
    arguments = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    if arguments.kind:
        measure(arguments.kind, arguments.tokens, arguments.repeats)
        return
    print(f"{arguments.tokens} tokens, {torch.get_num_threads()} threads, median of {arguments.repeats} pairs\n")
    for kind in CONFIGS:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--kind", kind], check=True)


def measure(kind: str, length: int, repeats: int) -> None:
    torch.manual_seed(0)
    plain: Any = AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    tokenizer = word_tokenizer(WORDS, TEMPLATE, end="<end>")
    start = time.perf_counter()
    model = kv.load(plain, tokenizer=tokenizer)
    ids = torch.randint(3, len(WORDS), (length + 16,), generator=torch.Generator().manual_seed(1)).tolist()
    text, rest = kv.Tokens.of(ids[:length]), kv.Tokens.of(ids[length:], "rest", length)
    cache = model.prefill(text)
    millions = sum(parameter.numel() for parameter in plain.parameters()) / 1e6
    tell(f"{kind}, {millions:.0f} M: load, prove and read", f"{time.perf_counter() - start:.1f} s")

    def read_by_transformers(upto: int) -> tuple[torch.Tensor, DynamicCache]:
        past = DynamicCache(config=plain.config)
        with torch.no_grad():
            return plain(torch.tensor([ids[:upto]]), past_key_values=past, logits_to_keep=1).logits[0], past

    whole, _ = read_by_transformers(length)
    close(model.extend(None, text)[1][0], whole)
    ratio("read the text", paired(lambda: model.prefill(text), lambda: read_by_transformers(length), repeats))

    def steps() -> torch.Tensor:
        past, logits = cache, torch.empty(0)
        for place in range(len(rest)):
            past, logits = model.extend(past, rest[place : place + 1])
        return logits[0]

    def steps_of_transformers() -> torch.Tensor:
        _, past = read_by_transformers(length)
        logits = torch.empty(0)
        with torch.no_grad():
            for token in rest.ids:
                logits = plain(torch.tensor([[token]]), past_key_values=past).logits[0]
        return logits

    close(steps(), steps_of_transformers())
    reading = paired(lambda: read_by_transformers(length), steps_of_transformers, repeats)
    ours, _, _ = paired(steps, steps, repeats)
    theirs = (reading[1] - reading[0]) / len(rest)
    ratio("one more token", (ours / len(rest), theirs, ours / len(rest) / theirs))
    tell("hide 64 slots and read 16 tokens", timed(lambda: model.extend(cache.mask(slots=range(64, 128)), rest)))
    words = [WORDS[id] for id in ids]
    turns = [" ".join(words[first : first + 60]) for first in range(0, 240, 60)]
    roles = ("user", "assistant") * 2
    chat = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
    tell("compare with a turn hidden", timed(lambda: kv.compare(model, chat, "m0", "w1 w2", max_new_tokens=8)))
    donor = model.prefill(kv.Tokens.of([*ids[:100], ids[99], *ids[101:length]]))
    cells: dict[str, Any] = {"over": ("layer",), "progress": False}
    metric = kv.LogProb((ids[5],))
    tell("patch every layer", timed(lambda: kv.patch_sweep(model, cache, donor, rest, metric, **cells)))
    tell("attention of the last token", timed(lambda: kv.attend(model, text)))
    with TemporaryDirectory() as folder:
        plain.config.save_pretrained(folder)
        budgeted = kv.budget(Path(folder), context=length, dtype="float32")
    held = read_by_transformers(length)[1]
    tell("cache of transformers, budgeted", f"{bytes_of(held) / 2**20:.2f} MiB, {budgeted.cache / 2**20:.2f} MiB")
    tell("cache of kvprobe", f"{cache.nbytes / 2**20:.2f} MiB")
    tell("peak of the process", f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")
    print(flush=True)


def bytes_of(past: DynamicCache) -> int:
    tensors = [tensor for layer in past.layers for tensor in tensors_of(layer)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def tensors_of(layer: Any) -> list[torch.Tensor]:
    states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    found = [getattr(layer, "keys", None), getattr(layer, "values", None), *states]
    return [tensor for tensor in found if tensor is not None]


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    assert float((one - other).abs().max() / other.abs().max()) < BOUND


def timed(run: Callable[[], object]) -> str:
    """How long it takes, or the sentence that refuses it."""
    try:
        run()
    except kv.UserError as refusal:
        return f"refused: {refusal}"
    start = time.perf_counter()
    run()
    return f"{1e3 * (time.perf_counter() - start):.0f} ms"


def ratio(what: str, times: tuple[float, float, float]) -> None:
    tell(what, f"{1e3 * times[0]:.0f} ms, transformers {1e3 * times[1]:.0f} ms, {times[2]:.2f} times")


def tell(what: str, found: str) -> None:
    print(f"{what:45}{found}", flush=True)


if __name__ == "__main__":
    main()
