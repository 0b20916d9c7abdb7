# %% [markdown]
# # From where is a fact read?
#
# Two conversations differ in one fact: the code of a safe. The slots of one cache are swapped for those of the other,
# a few at a time. Where the answer follows, the fact is read from there. The sweep separates layers, KV heads, slots,
# and keys from values.

# %%
import kvprobe as kv

model = kv.load("smollm2-135m")


def read(thing, code):
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": f"The code of the {thing} is {code}."},
        {"role": "assistant", "content": "I will keep it in mind."},
    ]
    return model.prefill(kv.Transcript.from_messages(messages, names=["system", "fact", "reply"]))


def pair(thing, code, other):
    """The run that is patched into, the run that is patched from, what is read after both, and what is measured."""
    asked = f"<|im_start|>user\nWhat is the code of the {thing}?<|im_end|>\n"
    lead = f"<|im_start|>assistant\nThe code of the {thing} is "
    first, second = (model.tokenizer(value[0], add_special_tokens=False)["input_ids"][0] for value in (code, other))
    return kv.Pair(read(thing, code), read(thing, other), asked + lead, kv.LogitDiff(right=second, wrong=first))


safe = pair("safe", "4817", "7306")
safe.base

# %% [markdown]
# `LogitDiff` is the logit of the other code's first digit minus that of the own code's: negative where the model says
# its own code, positive where it says the other. `normalised` is the share of the way from one to the other: 0 is no
# effect, 1 the whole answer.
#
# ## Which layers, keys or values?
#
# The segment `reply` is the control: it was computed with the code in view, but does not state it.

# %%
over = {"layer": None, "segment": ["fact", "reply"]}
patched = kv.patch_sweep(model, safe.base, safe.donor, safe.suffix, safe.metric, over, parts=["K", "V"])
patched

# %%
kv.plots.patching(patched, "layer", "segment")

# %% [markdown]
# One layer stands out, in V and not in K. The keys of the two runs are almost as good as each other: the model looks at
# the same place in both, and takes what is there.
#
# ## Which slot, which head?

# %%
tokens = safe.base.ledger.in_segments(["fact"])[0].nonzero()[:, 0].tolist()
over = {"layer": [23], "slot": tokens, "head": None}
slots = kv.patch_sweep(model, safe.base, safe.donor, safe.suffix, safe.metric, over, parts=["V"])
kv.plots.patching(slots, "slot", "head")

# %% [markdown]
# It is a single slot, that of the digit itself, in one KV head.
#
# ## Does it hold for other facts?
#
# The layer was chosen by looking at one fact, so it is tested on others: nine more things, with other codes. The layers
# before and after are the control. Intervals (95 %) are over these nine.

# %%
others = {
    "gate": ("2960", "5138"),
    "garage": ("8254", "3691"),
    "locker": ("6043", "1972"),
    "office": ("3581", "9426"),
    "cellar": ("7629", "4085"),
    "alarm": ("1374", "8950"),
    "studio": ("9208", "6517"),
    "bike lock": ("5463", "2781"),
    "suitcase": ("4692", "7153"),
}
pairs = [pair(thing, *codes) for thing, codes in others.items()]
over = {"layer": [22, 23, 24], "head": None, "segment": ["fact"]}
summary = kv.patch_pairs(model, pairs, over, parts=["V"]).summary(["layer", "head"])
summary[["layer", "head", "pairs", "normalised", "normalised_low", "normalised_high"]].round(3)

# %% [markdown]
# **Reading.** The first digit of the code is read from V of layer 23, in KV head 0. This site was chosen on the first
# fact and carries most of the way on the others, while its neighbours carry little or move the answer back.
#
# **Limits.** All facts have the same wording, so the intervals say nothing about other wordings: `kvprobe run patching`
# has sixteen different conversations. Cells need not add up, because two layers may hold the same. `reads="reader"`,
# the default, asks what the answer reads in the cache as it lies there; `reads="total"` asks what would have come of
# the change from the start. To start from here, replace `read` and `pair` by your own fact.
