"""Public reports of wrong caches, and of caches that were only thought to be wrong. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

GITHUB = "https://github.com/"


@dataclass(frozen=True)
class Report:
    """One public report.

    Attributes:
        address: of the thread, or of the paper.
        happened: what happened there, and how it is planted where that is a guess.
        scale: at which it happened.
        kind: of difference that it leaves in a cache.
        blocks: share of the blocks that it struck; 0 is one block.
        layers: share of the layers; 0 is one layer.
        place: the blocks: a prefix, the last ones, or any.
        benign: whether the cache was right after all.
        states: whether it struck the states of recurrent layers.
        read: whether the thread was read for this; else it is cited as others cite it, and a paper from its abstract
            and from summaries.
    """

    address: str
    happened: str
    scale: str
    kind: str
    blocks: float = 1.0
    layers: float = 1.0
    place: Literal["first", "last", "any"] = "any"
    benign: bool = False
    states: bool = False
    read: bool = True


def _issue(repository: str, number: int) -> str:
    return f"{GITHUB}{repository}/issues/{number}"


def _pull(repository: str, number: int) -> str:
    return f"{GITHUB}{repository}/pull/{number}"


_VLLM, _SGLANG, _LMCACHE = "vllm-project/vllm", "sgl-project/sglang", "LMCache/LMCache"

REPORTS: Mapping[str, Report] = {
    "lmcache-4463": Report(
        _issue(_LMCACHE, 4463),
        "vLLM 0.26 packs K and V of a slot side by side; the connector reads them as apart, and what it restores is "
        "mixed. With two KV heads both readings have the same shape.",
        "every layer of 36, every restored chunk of 256 tokens, each hit",
        "K and V interleaved",
        place="first",
    ),
    "lmcache-4247": Report(
        _issue(_LMCACHE, 4247),
        "In hybrid models a logical block of 1,600 slots is paged as 64; an edit that maps one to the other never "
        "matched the packed layout, so hits take other rows.",
        "16 attention layers of 64, prefix hits of several sessions",
        "repeated blocks",
        place="first",
        layers=0.25,
    ),
    "dynamo-14416": Report(
        _issue("ai-dynamo/dynamo", 14416),
        "A deployment of vLLM 0.26.0 with LMCache 0.5.2: [blocks, 2, block, heads, d] became "
        "[blocks, heads, block, 2 d], and cache hits silently give wrong text.",
        "every layer and block of each hit",
        "K and V interleaved",
        place="first",
    ),
    "vllm-52617": Report(
        _issue(_VLLM, 52617),
        "The decoder reports a full hit of the prompt's external cache, and diverges at its first token; a second "
        "report (LMCache #4614) shows one word over and over. The cause was open; planted as the packed layout of the "
        "same versions.",
        "a whole prompt of 895 tokens, every request",
        "K and V interleaved",
    ),
    "tt-vllm-415": Report(
        _issue("tenstorrent/vllm", 415),
        "A prompt is answered well on a cache miss, and with degenerate text on a hit, without concurrency or "
        "sampling. The report suspects prefill that resumes from cached blocks; planted as wrong rows of the prefix.",
        "the reused prefix of Llama-3.1-8B, 32 layers, each hit",
        "repeated blocks",
        place="first",
        blocks=0.5,
    ),
    "sglang-22819": Report(
        _issue(_SGLANG, 22819),
        "With deterministic inference, outputs change where a cached prefix ends at a block boundary; without the "
        "radix cache they do not. The cause was open; planted as a block of which the end is another request's.",
        "9 of 11 concurrent requests, one block, all layers",
        "stale",
        blocks=0.0,
    ),
    "transformers-47433": Report(
        _issue("huggingface/transformers", 47433),
        "A cache that is cropped to no slots keeps all of them, and one that is cropped by more slots than it has "
        "keeps some: rows that should be gone. Planted as the end of the last block.",
        "one slot of three after crop(-5), all three after crop(0), in each layer",
        "stale",
        blocks=0.0,
        place="last",
    ),
    "atom-2154": Report(
        _pull("ROCm/ATOM", 2154),
        "From prefill to decode workers only the paged rows of Kimi K3 were moved, so recurrent layers were decoded "
        "from zeroed states. The transfer counted as done, the text stayed fluent, and GSM8K did not show it.",
        "69 of 93 layers, the whole prefix",
        "zeroed",
        layers=69 / 93,
        states=True,
    ),
    "vllm-49716": Report(
        _issue(_VLLM, 49716),
        "Scales of int8 K and V lie beside them in padded pages; their strides were taken from the shape, so 320 of "
        "384 were found elsewhere.",
        "once many blocks are in use, hybrid models, all layers",
        "scale error",
        blocks=0.5,
    ),
    "vllm-50702": Report(
        _issue(_VLLM, 50702),
        "int8 K and V with prefix caching go wrong when the pool of blocks is full: skipped keys and spliced words in "
        "otherwise coherent JSON. The cause was open; planted as scales of other slots in one block.",
        "4 of 30 answers, single places, pool at 100 %",
        "scale error",
        blocks=0.0,
    ),
    "sglang-17839": Report(
        _issue(_SGLANG, 17839),
        "With piecewise CUDA graphs, gpt-oss-120b loses accuracy. canarypwn explains it by pointers to wrong rows, a "
        "later pull request (#21754) by a race on evicted sliding-window slots. How many is a guess here.",
        "the sliding-window half of the layers of gpt-oss; GSM8K 0.745 to 0.80 in place of 0.855",
        "repeated blocks",
        blocks=0.25,
        layers=0.5,
    ),
    "sglang-19107": Report(
        _pull(_SGLANG, 19107),
        "Sliding-window layers wrote fp8 K and V at indices of the pool of full layers, so that other rows were read.",
        "the sliding-window half of the layers of gpt-oss, every slot; text unusable",
        "repeated blocks",
        layers=0.5,
    ),
    "vllm-27547": Report(
        _pull(_VLLM, 27547),
        "The kernel was given the block size of the cache's manager in place of its own, and read wrong rows.",
        "the attention layers of Qwen3-Next, all blocks; GSM8K 0.02 in place of 0.85",
        "repeated blocks",
    ),
    "vllm-51837": Report(
        _pull(_VLLM, 51837),
        "On ROCm, K and V of a block lie in two far halves of a pool that layers with states share, so that each wrote "
        "over the other's pages; seen with speculative decoding. Planted as K and V in each other's place.",
        "the attention layers of hybrid models, any block; GSM8K 0.20 in place of 0.95",
        "K and V swapped",
        layers=0.5,
    ),
    "vllm-45357": Report(
        _pull(_VLLM, 45357),
        "A block was returned to the pool while a step in flight could still write to it, and another request's rows "
        "landed in it.",
        "one block, all layers",
        "foreign prefix",
        blocks=0.0,
    ),
    "vllm-30931": Report(
        _issue(_VLLM, 30931),
        "Adapters of one name and different weights shared cached blocks; planted as rows of another prompt: "
        "the zoo strikes caches of any model, and the adapters that ship with kvprobe are of SmolLM2 alone.",
        "the whole shared prefix, all layers (Llama-3.3-70B)",
        "foreign prefix",
        place="first",
    ),
    "vllm-44701": Report(
        _issue(_VLLM, 44701),
        "An adapter's name and a request's cache_salt enter a block's hash untagged: a request to the plain model "
        "whose salt is that name is answered from the adapter's rows; planted as vllm-30931.",
        "a shared prefix, all layers",
        "foreign prefix",
        place="first",
        blocks=0.5,
    ),
    "lmcache-3301": Report(
        _issue(_LMCACHE, 3301),
        "Image hashes are cut to 16 bits for the cache's key; after a few hundred images two collide, and one is "
        "answered from the other's rows.",
        "the slots of an image, all layers",
        "foreign prefix",
        place="first",
        blocks=0.5,
    ),
    "llama-cpp-3825": Report(
        _issue("ggml-org/llama.cpp", 3825),
        "Of two shifts of the same cells only the last was applied to their keys, while their positions took both.",
        "all cells behind the removed ones, all layers",
        "position shift",
        place="last",
        blocks=0.5,
    ),
    "sglang-20705": Report(
        _pull(_SGLANG, 20705),
        "Scales of an fp8 cache were loaded and ignored, 1.0 in their place (files have 0.04), or crashed.",
        "all layers and slots",
        "scale error",
    ),
    "flash-attention-1745": Report(
        _issue("Dao-AILab/flash-attention", 1745),
        "NaN in slots past the length reaches the output; planted in the last block.",
        "the unused end of a buffer, all layers",
        "not finite",
        place="last",
        blocks=0.0,
    ),
    "vllm-53856": Report(
        _pull(_VLLM, 53856),
        "Attention on ROCm masks the scores of slots past the length, and reads their V: where one was never written "
        "and holds NaN, 0 × NaN is NaN. K does no harm there. Planted as V of the last block.",
        "unwritten slots of the last block; one of them is enough",
        "not finite",
        blocks=0.0,
        layers=0.0,
        place="last",
    ),
    "bit-flips": Report(
        "https://arxiv.org/abs/2604.17249",
        "One bit of a shared block of a prefix cache flips; 13 of the 16 bits of bfloat16 give coherent, altered text.",
        "one number of one layer",
        "bit flip",
        blocks=0.0,
        layers=0.0,
        read=False,
    ),
    "channel-order": Report(
        f"{GITHUB}ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py",
        "No report, but a trap: llama.cpp stores the rotary pairs of Llama's keys side by side, transformers half a "
        "key apart; a cache that is moved without reordering is wrong everywhere.",
        "all layers and slots",
        "channel order",
    ),
    "history-swap": Report(
        "https://arxiv.org/abs/2511.12752",
        "An attack (Whose Narrative is it Anyway?): while a reply is written, the cache's most recent rows are "
        "overwritten with those of a text on another topic. The topic changes only where all layers are overwritten. "
        "Planted as the other text's rows at the same slots, where the attack takes its first.",
        "a share of the rows, in many settings of when, how many and which layers (Qwen 3)",
        "foreign prefix",
        place="last",
        blocks=0.5,
        read=False,
    ),
    "injected-keys": Report(
        "https://arxiv.org/abs/2510.17098",
        "An attack (Can Transformer Memory Be Corrupted?): noise is added to keys, or they are zeroed or rotated. "
        "Planted as noise in place of keys, at each head's scale, for atom-2154 zeroes and llama-cpp-3825 rotates.",
        "keys alone, in layers and at steps that the attacker chooses (GPT-2, LLaMA-2 7B)",
        "unknown",
        blocks=0.25,
        layers=0.25,
        read=False,
    ),
    "tpu-inference-3369": Report(
        _pull("vllm-project/tpu-inference", 3369),
        "A check that compares texts fails as often without any transfer: blocks of a prefix hit are reused verbatim, "
        "and 9 of 64 texts still diverge. Nothing is planted.",
        "9 of 64 texts (14 %) at identical K and V, 7 of 64 at another chunking",
        "none",
        benign=True,
    ),
    "vllm-39146": Report(
        _issue(_VLLM, 39146),
        "Reported as corrupt blocks: greedy texts depend on what else is in the batch, without prefix "
        "caching. Rounding does that; planted as half of all numbers off by the last place of bfloat16.",
        "11 of 21 concurrent requests, in 10 of 10 runs",
        "numerics",
        benign=True,
    ),
    "vllm-13133": Report(
        _issue(_VLLM, 13133),
        "Often cited for a wrong fp8 scale; a backend ignored the setting and kept 16 bits. Planted as fp8 at its "
        "right scale.",
        "all layers and slots",
        "quantisation",
        benign=True,
    ),
}
"""By name: repository and number."""
