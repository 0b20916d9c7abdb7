"""The connector of vLLM against transformers, on a CPU: what it dumps, and what follows from a cache that was edited.

Run by `make engines`, in an environment of its own:

    python benchmarks/engines_vllm.py FOLDER_OF_A_LLAMA_MODEL [--dtype bfloat16]
    python benchmarks/engines_vllm.py tests/engines/recorded/model --record tests/engines/recorded

Two prompts that differ in a number are read by vLLM and dumped. K and V are compared with transformers'. Then layers of
the first cache are replaced by those of the second, and vLLM and transformers go on from it. It ends with exit code 1
where they differ by more than rounding.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.vllm_dumps import engine_of
from kvprobe.cache.cache import KVCache
from kvprobe.engines.plain import open_plain, save_plain

TOKENS, CUT, TOP = 80, 64, 20
ALLOWED = {"float32": 1e-5, "bfloat16": 0.05}
"""Difference of K and V, relative to the largest number of the layer."""


def prompts(vocabulary: int) -> list[list[int]]:
    """Two prompts of random tokens that differ in five of them."""
    rng = torch.Generator().manual_seed(0)
    ids = torch.randint(10, vocabulary, (TOKENS,), generator=rng)
    other = ids.clone()
    other[20:25] = torch.randint(10, vocabulary, (5,), generator=rng)
    return [ids.tolist(), other.tolist()]


def reference(
    model: torch.nn.Module, ids: list[int], cache: KVCache | None = None
) -> tuple[DynamicCache, torch.Tensor]:
    """transformers' cache of a prompt, and the log-probabilities that follow it; after a cache of its first slots."""
    past, begin = DynamicCache(), 0
    for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)) if cache else ():
        past.update(keys.clone(), values.clone(), layer)
        begin = cache.slots
    with torch.no_grad():
        scores = model(torch.tensor([ids[begin:]]), past_key_values=past).logits[0, -1]
    return past, scores.float().log_softmax(-1)


def make_tiny(folder: Path) -> None:
    """A random Llama whose dumps are small; heads have 32 channels, since vLLM's kernel on a CPU takes no fewer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.3, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=256)).save_pretrained(folder)


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=[*ALLOWED], default="float32")
    parser.add_argument("--record", type=Path, help="folder for dumps that tests read, of a tiny model made there")
    arguments = parser.parse_args()
    if arguments.record and not arguments.model.is_dir():
        make_tiny(arguments.model)
    from vllm import SamplingParams

    folder = arguments.record or Path(tempfile.mkdtemp())
    engine = engine_of(arguments.model, arguments.dtype, folder)

    def asked(ids: list[int], **files: str) -> dict[int, float]:
        """Log-probabilities of the likeliest next tokens."""
        sampling = SamplingParams(
            temperature=0, max_tokens=1, logprobs=TOP, detokenize=False, extra_args={"kv_transfer_params": files}
        )
        (result,) = engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
        return {token: entry.logprob for token, entry in result.outputs[0].logprobs[0].items()}

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype).eval()
    clean, other = prompts(model.config.vocab_size)
    allowed, failed = ALLOWED[arguments.dtype], False

    def row(what: str, difference: float, limit: float) -> None:
        nonlocal failed
        failed |= difference > limit
        print(f"{what:62}{difference:10.1e}{limit:10.1e}  {'ok' if difference <= limit else 'FAILED'}")

    print(f"{open_plain(dump(asked, folder, clean, 'clean.json'))}\n\n{'':62}{'found':>10}{'allowed':>10}")
    dump(asked, folder, other, "other.json")
    caches = {name: open_plain(folder / f"{name}.json").cache() for name in ("clean", "other")}
    for name, ids in (("clean", clean), ("other", other)):
        past, _ = reference(model, ids)
        for part, held in (("K", "keys"), ("V", "values")):
            pairs = zip(caches[name].part(part), (getattr(layer, held) for layer in past.layers), strict=True)
            row(
                f"{part} of the {name} prompt, dumped, against transformers'", max(distance(*p) for p in pairs), allowed
            )
    cut = {name: cache.rewind(slots=CUT) for name, cache in caches.items()}
    layers = range(model.config.num_hidden_layers // 3, 2 * model.config.num_hidden_layers // 3)
    cut["patched"] = cut["clean"].patch(cut["other"], slots=[*range(CUT)], layers=layers)
    said: dict[str, torch.Tensor] = {}
    answers: dict[str, dict[int, float]] = {}
    for name in ("clean", "patched"):
        save_plain(cut[name], folder / f"{name}-{CUT}.json")
        after = answers[name] = asked(clean, load=f"{name}-{CUT}.json")
        said[name] = reference(model, clean, cut[name])[1]
        most = max(abs(float(said[name][token]) - value) for token, value in after.items())
        row(f"log-probabilities after the {name} cache was loaded", most, 10 * allowed)
    computed = asked(clean)
    loaded = asked(clean, load=f"clean-{CUT}.json")
    both = computed.keys() & loaded.keys()
    row("vLLM, clean cache loaded, against computed", max(abs(computed[t] - loaded[t]) for t in both), 10 * allowed)
    moved = float((said["clean"].exp() * (said["clean"] - said["patched"])).sum())
    print(f"\nThe patch moves the next token's distribution by {moved:.3f} nats (KL, transformers).")
    if arguments.record:
        for path in folder.glob(f"*-{CUT}.*"):
            path.unlink()
        record = {"slots": CUT, "layers": [*layers], "answers": answers}
        (folder / "answers.json").write_text(json.dumps(record, indent=1) + "\n")
    if failed:
        sys.exit(1)


def dump(asked, folder: Path, ids: list[int], name: str) -> Path:
    asked(ids, dump=name)
    return folder / name


if __name__ == "__main__":
    main()
