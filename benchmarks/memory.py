"""The budget beside the formulas of two public calculators, on configs from the hub; a table of docs/results/memory.md.

Each model has the longest context that it was trained for, one conversation, and two bytes a number. The formulas are
applied to the config as it is published, without the fields that it leaves out:

- the KV cache calculator in the documentation of LMCache (LMCache/LMCache at 375a749c, Apache-2.0,
  docs/source/_static/kv_cache_calculator.html), which has one formula for most models, and two for single models;
- hf-mem (alvarobartt/hf-mem, src/hf_mem/safetensors/kv_cache.py at e9946791, MIT, there called experimental).

    python benchmarks/memory.py [--table]
"""

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

from timing import Row, main

from kvprobe.memory.budget import budget
from kvprobe.memory.sources import shipped_configs

CHOSEN = (
    "Qwen/Qwen3-8B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "google/gemma-2-9b-it",
    "google/gemma-3-27b-it",
    "google/gemma-3-4b-it",
    "google/gemma-3n-E4B-it",
    "openai/gpt-oss-120b",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "deepseek-ai/DeepSeek-V3.1",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "ai21labs/Jamba-v0.1",
    "mistralai/Mistral-7B-v0.1",
    "tiiuae/falcon-40b",
)

BYTES = 2
"""Of a number, bfloat16."""


def lmcache(name: str, config: Mapping[str, Any], tokens: int) -> float | None:
    """Bytes by LMCache's calculator; None if the config lacks a field that it needs."""
    layers = config.get("num_hidden_layers")
    if "DeepSeek" in name and "kv_lora_rank" in config:
        return layers * tokens * (config["kv_lora_rank"] + config["qk_rope_head_dim"]) * BYTES
    if not layers or "num_key_value_heads" not in config:
        return None
    d_head = config["hidden_size"] / config["num_attention_heads"]
    if "qwen/qwen3-" in name.lower():
        d_head = config.get("head_dim", d_head)
    return 2 * layers * tokens * config["num_key_value_heads"] * d_head * BYTES


def hf_mem(config: Mapping[str, Any], tokens: int) -> float | None:
    """Bytes by hf-mem; None if the config lacks a field that it needs."""
    if any(name not in config for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")):
        return None
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    if "sliding_window_pattern" in config:
        full = layers // config["sliding_window_pattern"]
    elif "layer_types" in config:
        full = sum(kind in ("attention", "full_attention", "global_attention") for kind in config["layer_types"])
    else:
        full = layers
    window = min(config.get("sliding_window") or tokens, tokens)
    width = config.get("num_key_value_heads", heads) * config.get("head_dim", config["hidden_size"] // heads)
    return 2 * (full * tokens + (layers - full) * window) * width * BYTES


def table() -> list[str]:
    """The table in Markdown, one line for each model."""
    lines = [
        "| model | tokens | logical | transformers, after the prompt | then | vLLM | LMCache's calculator | hf-mem |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in CHOSEN:
        published = json.loads(shipped_configs()[name].read_text(encoding="utf-8"))
        config = published.get("text_config", published)
        first = budget(name, dtype="bfloat16")
        tokens = min(first.trained_context or 2048, 131_072)
        asked: dict[str, Any] = {"context": tokens, "dtype": "bfloat16"}
        read, grown = (budget(name, new=new, **asked) for new in (0, 1))
        blocks = budget(name, engine="vllm", **asked)
        logical = sum(read.logical)
        cells = [name, f"{tokens:,}", _size(logical)]
        cells += [_size(size) for size in (read.cache, grown.cache, blocks.cache)]
        cells += [_beside(size, logical) for size in (lmcache(name, config, tokens), hf_mem(config, tokens))]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def measure(asked: Namespace) -> Iterator[Row]:
    """The calculators beside the budget: bytes of the cache."""
    if asked.table:
        print("\n".join(table()))
        return
    for name in CHOSEN[: 3 if asked.quick else None]:
        published = json.loads(shipped_configs()[name].read_text(encoding="utf-8"))
        config = published.get("text_config", published)
        tokens = min(budget(name, dtype="bfloat16").trained_context or 2048, 131_072)
        logical = sum(budget(name, context=tokens, dtype="bfloat16").logical)
        for calculator, size in (
            ("LMCache's calculator", lmcache(name, config, tokens)),
            ("hf-mem", hf_mem(config, tokens)),
        ):
            if size is None:
                yield Row(f"{name}, {tokens:,} tokens", calculator, unit="B", note="the config lacks what it needs")
            else:
                yield Row.of(f"{name}, {tokens:,} tokens", calculator, [logical], [size], unit="B")


def _size(count: float) -> str:
    return f"{count / 1e9:.2f} GB"


def _beside(size: float | None, logical: int) -> str:
    return "none" if size is None else f"{_size(size)} ({100 * (size / logical - 1):+.0f} %)"


if __name__ == "__main__":
    main(measure, __doc__, flags=lambda parser: parser.add_argument("--table", action="store_true"))
