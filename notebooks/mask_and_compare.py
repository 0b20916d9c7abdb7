# %% [markdown]
# # What is left of a hidden message?
#
# A message can be hidden from a model after it was read. The messages after it stay in the cache, and they were
# computed while it was in view. This notebook hides the message with a gate code, asks for the code in four ways, and
# measures whether the cache remembers which code it was.

# %%
import matplotlib.pyplot as plt
import numpy as np
import seaborn as sns

import kvprobe as kv
from kvprobe.stats import estimate

model = kv.load("smollm2-135m")


def conversation(code):
    return kv.Transcript.from_messages(
        [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": f"The gate code is {code}."},
            {"role": "assistant", "content": "Thank you, I have noted the gate code."},
            {"role": "user", "content": "I will plant tomatoes today."},
            {"role": "assistant", "content": "Tomatoes like the sun."},
        ],
        names=["system", "code", "noted", "plan", "advice"],
    )


model.prefill(conversation("48213")).mask("code")

# %% [markdown]
# The bar above is the cache: one block for each message, pale where no later token can attend. Masking moves nothing.
# The other messages keep their positions, their keys and their values.
#
# ## One question, four caches
#
# `kv.compare` asks with everything in view, after the mask, after closing the gap (keys rotated to new positions), and
# after a restart that never read the message. `logprob` and `kl` are per token of the reply that is given with
# everything in view.

# %%
question = "What is the gate code?"
comparison = kv.compare(model, conversation("48213"), ["code"], question, max_new_tokens=12)
comparison

# %%
kv.plots.replies(comparison)

# %% [markdown]
# The words of the reply stay likely, the digits do not. But does the mask hide the code, or does any mask break the
# model? The control hides another message of the same conversation.

# %%
kv.compare(model, conversation("48213"), ["plan"], question, max_new_tokens=12)

# %% [markdown]
# With another message hidden, the code is still given: it is this message that the answer needs.
#
# ## Does the masked cache remember which code it was?
#
# One reply cannot answer this. So eight codes are hidden, one at a time, and each cache is asked for all eight. If a
# cache knows its own code, the diagonal stands out. The caches with everything in view show what that looks like.

# %%
codes = ["48213", "70956", "13587", "92640", "56174", "81302", "24769", "60435"]
lead = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\nThe gate code is"
digits = [model.tokenizer(code, add_special_tokens=False)["input_ids"] for code in codes]


def log_probabilities(cache):
    """Of each code as the answer, in nats."""
    asked, _ = model.extend(cache, lead)
    _, logits = model.extend(asked, [f" {code[:-1]}" for code in codes], logits=5)
    return [float(kv.LogProb.of(answer)(row)) for answer, row in zip(digits, logits, strict=True)]


full = [model.prefill(conversation(code)) for code in codes]
asked_of = {
    "everything in view": np.array([log_probabilities(cache) for cache in full]),
    "code masked": np.array([log_probabilities(cache.mask("code")) for cache in full]),
}
figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), sharey=True, layout="constrained")
for axis, (name, values) in zip(axes, asked_of.items(), strict=True):
    sns.heatmap(values, ax=axis, cmap="Blues", vmin=-20, vmax=0, xticklabels=codes, yticklabels=codes, square=True)
    axis.tick_params(axis="x", rotation=90)
    axis.set(title=f"{name}: log-probability, nats", xlabel="code asked for", ylabel="code in the cache")
    axis.label_outer()
# %%
for name, values in asked_of.items():
    diagonal = values.diagonal()
    others = (values.sum(0) - diagonal) / (len(codes) - 1)
    print(f"{name}: own code less the same code in other caches, nats: {estimate(diagonal - others)}")

# %% [markdown]
# **Reading.** With everything in view, the cache makes its own code far more likely than other caches do. After the
# mask nothing of this is detected: the interval contains zero, which is what caches without the code would give. By
# what it says, the model has lost the code.
#
# **Limits.** The intervals (95 %) are over eight codes in one conversation of one small model. And what a model does
# not say may still be in its cache: `kvprobe run leakage` reads hidden codes from many conversations with probes, and
# the notebook `probe_your_own_secret` does so for a secret of yours. To start from here, replace `conversation`.
