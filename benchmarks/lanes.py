"""What kvprobe costs beside the library that a user would pick instead, on real weights, in the same run.

Every comparison first asserts that both sides give the same result. Runs alternate, so that a drift of the
machine's speed touches both sides; the ratio is the median of the paired ratios.

    make benchmark          or          python benchmarks/lanes.py --repeats 15
"""

import gc

import torch
from timing import asked, header, paired, report
from transformers import DynamicCache

import kvprobe as kv
from kvprobe.inference.generate import generate
from kvprobe.text.tokens import Tokens

LENGTH, NEW_TOKENS = 512, 32


def main() -> None:
    arguments = asked(__doc__, 11)
    model = kv.load(arguments.model)
    ids = torch.randint(5, 20_000, (1, LENGTH), generator=torch.Generator().manual_seed(0)).to(model.lanes.device)
    header(model.name, LENGTH, arguments.repeats)
    prefill(model, ids, arguments.repeats)
    decode(model, ids, arguments.repeats)
    capture(model, ids, arguments.repeats)


def prefill(model: kv.Model, ids: torch.Tensor, repeats: int) -> None:
    tokens = Tokens.of(ids[0].tolist())

    def ours() -> torch.Tensor:
        return model.extend(None, tokens)[1][:, -1]

    def bare() -> torch.Tensor:
        with torch.no_grad():
            return model.lanes.plain(ids, use_cache=True, logits_to_keep=1).logits[:, -1]

    torch.testing.assert_close(ours(), bare())
    report("prefill, beside bare transformers", *paired(ours, bare, repeats), "1.05")


def decode(model: kv.Model, ids: torch.Tensor, repeats: int) -> None:
    prompt = ids[:, :64]
    tokens = [Tokens.of(prompt[0].tolist())]

    def ours() -> list[int]:
        return list(generate(model.lanes, tokens, max_new_tokens=NEW_TOKENS, stop=()).tokens[0])

    def bare() -> list[int]:
        past, following, chosen = DynamicCache(), prompt, []
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                logits = model.lanes.plain(following, past_key_values=past, use_cache=True, logits_to_keep=1).logits
                following = logits[:, -1].argmax(-1, keepdim=True)
                chosen.append(int(following))
        return chosen

    def library() -> list[int]:
        mask = torch.ones_like(prompt)
        done = model.lanes.plain.generate(
            prompt, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return done[0, prompt.shape[1] :].tolist()

    assert ours() == bare() == library()
    report(f"decode {NEW_TOKENS} tokens, beside a bare loop", *paired(ours, bare, repeats), "1.05")
    report(f"decode {NEW_TOKENS} tokens, beside transformers.generate", *paired(ours, library, repeats), "")


def capture(model: kv.Model, ids: torch.Tensor, repeats: int) -> None:
    tokens = Tokens.of(ids[0].tolist())
    bridge = model.lanes.hooked.bridge
    layers = range(model.geometry.n_layers)
    names = [f"blocks.{layer}.attn.{hook}" for layer in layers for hook in ("hook_rot_k", "hook_v")]

    def ours() -> dict:
        return dict(model.capture(tokens, ["k", "v"]).tensors)

    def bare() -> torch.Tensor:
        with torch.no_grad():
            return model.lanes.plain(ids, use_cache=True, logits_to_keep=1).logits

    def filtered() -> dict:
        with torch.no_grad():
            return bridge.run_with_cache(ids, names_filter=names)[1]

    def unfiltered() -> dict:
        with torch.no_grad():
            return bridge.run_with_cache(ids)[1]

    seen, theirs, whole = ours(), filtered(), unfiltered()
    for layer in layers:
        for family, hook in (("k", "hook_rot_k"), ("v", "hook_v")):
            other = theirs[f"blocks.{layer}.attn.{hook}"].transpose(1, 2)
            torch.testing.assert_close(seen[family, layer], other, rtol=0, atol=1e-5 * float(other.abs().max()))
    share = held(seen.values()) / held(whole.values())
    assert share <= 0.1, f"capturing K and V holds {share:.0%} of the memory of an unfiltered cache"
    del theirs, whole
    gc.collect()
    report("K and V of all layers, beside a bare forward", *paired(ours, bare, repeats), "1.05")
    report("K and V, beside run_with_cache filtered", *paired(ours, filtered, repeats), "")
    report("K and V, beside run_with_cache unfiltered", *paired(ours, unfiltered, max(3, repeats // 3)), "")
    print(f"{'bytes held, beside run_with_cache unfiltered':50}{'':20}{share:8.3f}  0.1")


def held(tensors) -> int:
    """Bytes of the distinct storages behind these tensors."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


if __name__ == "__main__":
    main()
