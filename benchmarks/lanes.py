"""What kvprobe costs beside the library that a user would pick instead, on real weights, in the same run.

Every comparison first asserts that both sides give the same result.

    python benchmarks/lanes.py --repeats 15
"""

import gc
from argparse import Namespace
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from timing import Row, assert_same, compared, main
from transformers import DynamicCache

import kvprobe as kv
from kvprobe.inference.generate import generate
from kvprobe.text.tokens import Tokens


def measure(asked: Namespace) -> Iterator[Row]:
    model = kv.load(asked.model)
    length, new = (128, 8) if asked.quick else (512, 32)
    ids = torch.randint(5, 20_000, (1, length), generator=torch.Generator().manual_seed(0)).to(model.lanes.device)
    yield prefill(model, ids, asked.repeats)
    yield from decode(model, ids, new, asked.repeats)
    yield from capture(model, ids, asked.repeats)


def prefill(model: kv.Model, ids: torch.Tensor, repeats: int) -> Row:
    tokens = Tokens.of(ids[0].tolist())

    def ours() -> torch.Tensor:
        return model.extend(None, tokens)[1][:, -1]

    def bare() -> torch.Tensor:
        with torch.no_grad():
            return model.lanes.plain(ids, use_cache=True, logits_to_keep=1).logits[:, -1]

    assert_same(ours(), bare())
    return compared(f"read {ids.shape[1]} tokens", "transformers, bare", ours, bare, repeats, most=1.05)


def decode(model: kv.Model, ids: torch.Tensor, new: int, repeats: int) -> Iterator[Row]:
    prompt = ids[:, :64]
    tokens = [Tokens.of(prompt[0].tolist())]

    def ours() -> list[int]:
        return list(generate(model.lanes, tokens, max_new_tokens=new, stop=()).tokens[0])

    def bare() -> list[int]:
        past, following, chosen = DynamicCache(), prompt, []
        with torch.no_grad():
            for _ in range(new):
                logits = model.lanes.plain(following, past_key_values=past, use_cache=True, logits_to_keep=1).logits
                following = logits[:, -1].argmax(-1, keepdim=True)
                chosen.append(int(following))
        return chosen

    def library() -> list[int]:
        mask = torch.ones_like(prompt)
        generated: Any = model.lanes.plain.generate
        done = generated(
            prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return done[0, prompt.shape[1] :].tolist()

    assert ours() == bare() == library()
    yield compared(f"decode {new} tokens", "transformers, a bare loop", ours, bare, repeats, most=1.05)
    yield compared(f"decode {new} tokens", "transformers, generate", ours, library, repeats)


def capture(model: kv.Model, ids: torch.Tensor, repeats: int) -> Iterator[Row]:
    tokens = Tokens.of(ids[0].tolist())
    bridge = model.lanes.hooked.bridge
    layers = range(model.geometry.n_layers)
    names = [f"blocks.{layer}.attn.{hook}" for layer in layers for hook in ("hook_rot_k", "hook_v")]

    def ours() -> dict:
        return dict(model.capture(tokens, ["k", "v"]).tensors)

    def bare() -> torch.Tensor:
        with torch.no_grad():
            return model.lanes.plain(ids, use_cache=True, logits_to_keep=1).logits

    def filtered() -> Any:
        with torch.no_grad():
            return bridge.run_with_cache(ids, names_filter=names)[1]

    def unfiltered() -> Any:
        with torch.no_grad():
            return bridge.run_with_cache(ids)[1]

    seen, theirs, whole = ours(), filtered(), unfiltered()
    for layer in layers:
        for family, hook in (("k", "hook_rot_k"), ("v", "hook_v")):
            other = theirs[f"blocks.{layer}.attn.{hook}"].transpose(1, 2)
            assert_same(seen[family, layer], other)
    everything = "TransformerLens, run_with_cache"
    yield Row.of("bytes of K and V held", everything, [held(seen.values())], [held(whole.values())], unit="B", most=0.1)
    del theirs, whole
    gc.collect()
    what = "capture K and V of all layers"
    yield compared(what, "transformers, a bare forward pass", ours, bare, repeats, most=1.05)
    yield compared(what, f"{everything} filtered", ours, filtered, repeats)
    yield compared(what, everything, ours, unfiltered, max(2, repeats // 3))


def held(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind these tensors."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


if __name__ == "__main__":
    main(measure, __doc__)
