# %% [markdown]
# # Where does attention go when a message is hidden?
#
# A model is about to answer a question. Which heads look at the message that has the answer? Where does their attention
# go when it is masked? And does the answer depend on these heads?

# %%
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

import kvprobe as kv
from kvprobe.stats import SHARE, estimate

model = kv.load("smollm2-135m")
lead = "<|im_start|>user\nWhat is the gate code?<|im_end|>\n<|im_start|>assistant\nThe gate code is "


def read(code):
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": f"The gate code is {code}."},
        {"role": "assistant", "content": "Thank you, I have noted the gate code."},
        {"role": "user", "content": "I will plant tomatoes today."},
        {"role": "assistant", "content": "Tomatoes like the sun."},
    ]
    return model.prefill(kv.Transcript.from_messages(messages, names=["system", "code", "noted", "plan", "advice"]))


cache = read("48213")
before = kv.attend(model, lead, cache)
after = kv.attend(model, lead, cache.mask("code"))
before

# %% [markdown]
# The table shows, layer by layer, how much attention the last token spends on each segment, as a mean over heads. The
# next token is the first digit of the code.
#
# ## Which heads lose something?
#
# `dangling` is the attention that a head spent on slots that are gone after the mask.

# %%
lost = kv.attention.dangling(before, after, ["code"])
share = len(before.slots("code")) / before.cache.slots
print(f"mean over heads {lost['dangling'].mean():.3f}; evenly spread attention would give {share:.3f}")
kv.plots.by_head(lost, "dangling", "attention on the hidden message")

# %% [markdown]
# On average the message gets less attention than if attention were spread evenly. A few heads look at little else.
#
# ## Where does it go?
#
# `sink` is the first slot, `local` the last 32. The gains of a head add up to what it lost.

# %%
lost.sort_values("dangling", ascending=False).head(6).round(3)

# %% [markdown]
# Some heads fall back on the sink, as if they had found nothing. Others spread over what is near. Softmax must put the
# attention somewhere, so a gain does not show what a head wants.
#
# ## Does the answer depend on these heads?
#
# Attention alone does not show it. So the message is hidden from three KV heads only: from those that lose most, and as
# a control from three at random, six times over. Heads are ranked on the code above and tested on eight other codes.
# (Three query heads share one KV head; the model has 90 KV heads.)

# %%
group = model.geometry.n_heads // model.geometry.n_kv_heads
ranked = lost.assign(kv_head=lost["head"] // group).groupby(["layer", "kv_head"])["dangling"].max()
heads = ranked.sort_values(ascending=False).index.tolist()
rng = np.random.default_rng(0)


def probability(code, cache, hidden_from=()):
    """Of the first digit of the code, with the message hidden from these KV heads."""
    for layer, head in hidden_from:
        cache = cache.mask("code", layers=[layer], heads=[head])
    digit = model.tokenizer(code[0], add_special_tokens=False)["input_ids"][0]
    return float(model.extend(cache, lead)[1][0, -1].softmax(-1)[digit])


rows = {}
for code in ("70956", "13587", "92640", "56174", "81302", "24769", "60435", "37918"):
    full = read(code)
    draws = [[heads[place] for place in rng.permutation(len(heads))[:3]] for _ in range(6)]
    rows[code] = {
        "none": probability(code, full),
        "3 at random": np.mean([probability(code, full, drawn) for drawn in draws]),
        "3 that lose most": probability(code, full, heads[:3]),
        "all": probability(code, full.mask("code")),
    }
answered = pd.DataFrame(rows).T

# %%
figure, axis = plt.subplots(figsize=(5, 2.6), layout="constrained")
for place, name in enumerate(answered):
    value = estimate(answered[name].to_numpy(), within=SHARE)
    axis.plot(answered[name], [place + 0.18] * len(answered), "|", color="0.5")
    axis.plot(value.ends, [place] * 2, color="#0072b2")
    axis.plot(value.mean, place, "o", color="#0072b2")
axis.set_yticks(range(len(answered.columns)), answered.columns)
axis.set(xlabel="probability of the first digit", ylabel="hidden from KV heads", xlim=(0, 1))
axis.invert_yaxis()

# %% [markdown]
# **Reading.** Each stroke is a code, each line a 95 % interval over the eight codes. Hiding the message from the three
# KV heads that look at it most takes most of the answer away, about as much as hiding it from all. Three heads at
# random take little. Here attention points to the heads that matter.
#
# **Limits.** One conversation of one small model, and the first digit only. A head may look hard at a slot and take
# little from it: `kv.attention.contribution` measures what it takes, and the notebook `patch_a_fact` swaps it. To see
# every head and token, save an interactive page: `kv.views.Page([kv.views.patterns_view(before, model.tokenizer)],
# "Attention").save("attention.html")`. To start from here, replace `read` and `lead`.
