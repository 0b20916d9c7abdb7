"""Lets vLLM read texts on a CPU, and dumps the cache of each by kvprobe's connector.

Run by `benchmarks/floors.py measure … --engine vllm`, in the environment that `make engines` makes:

    python -m benchmarks.vllm_dumps FOLDER_OF_A_MODEL TEXTS.json --dtype bfloat16 --way portions --out dumps/

TEXTS.json holds lists of ids; the dump of the third is dumps/002.json.
"""

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

BLOCK = 32
"""Slots: vLLM takes no smaller blocks on a CPU."""
CHUNK, ROWS = 16, 4
"""Tokens of a step in portions, and texts that are read side by side."""
WAYS: Mapping[str, Mapping[str, Any]] = {
    "whole": {},
    "batched": {},
    "portions": {"enable_prefix_caching": True, "max_num_batched_tokens": CHUNK},
    "singly": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
}
"""How a text is read: at once and alone; side by side with others; after blocks of its first half, which was read
before, in portions; or token by token, as an answer is."""


def engine_of(model: Path, dtype: str, folder: Path, **settings: Any) -> Any:
    """vLLM with the connector, which writes into this folder."""
    from vllm import LLM
    from vllm.config import KVTransferConfig

    chosen = {"enable_prefix_caching": False, "max_num_seqs": ROWS, **settings}
    return LLM(
        str(model),
        dtype=dtype,
        max_model_len=256,
        enforce_eager=True,
        block_size=BLOCK,
        skip_tokenizer_init=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvprobeConnector",
            kv_connector_module_path="kvprobe.engines.vllm",
            kv_role="kv_both",
            kv_connector_extra_config={"folder": str(folder)},
        ),
        **chosen,
    )


def read(engine: Any, texts: list[list[int]], files: list[str] | None = None) -> int:
    """Let the engine read texts side by side, and dump them to files; how many of their tokens it had read before."""
    from vllm import SamplingParams

    sampling = [SamplingParams(temperature=0, max_tokens=1, detokenize=False) for _ in texts]
    for one, file in zip(sampling, files or (), strict=bool(files)):
        one.extra_args = {"kv_transfer_params": {"dump": file}}
    results = engine.generate([{"prompt_token_ids": ids} for ids in texts], sampling, use_tqdm=False)
    return sum(result.num_cached_tokens or 0 for result in results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--way", choices=[*WAYS], default="whole")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    texts = json.loads(arguments.texts.read_text(encoding="utf-8"))
    engine = engine_of(arguments.model, arguments.dtype, arguments.out, **WAYS[arguments.way])
    rows, reused = ROWS if arguments.way == "batched" else 1, 0
    for start in range(0, len(texts), rows):
        some = texts[start : start + rows]
        if arguments.way == "portions":
            read(engine, [ids[: len(ids) // 2 + 1] for ids in some])
        reused += read(engine, some, [f"{start + row:03}.json" for row in range(len(some))])
    print(f"{len(texts)} texts, of whose {sum(map(len, texts))} tokens {reused} were read before")


if __name__ == "__main__":
    main()
