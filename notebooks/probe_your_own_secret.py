# %% [markdown]
# # Does the cache still hold my secret?
#
# A message names an animal. It is hidden after it was read and answered. Can a linear probe still read the animal from
# the cache, and does the model use it? Such a claim needs a design, floors and controls. `kv.probe` takes the design
# and measures the rest.

# %%
import numpy as np

import kvprobe as kv

model = kv.load("smollm2-135m")
jobs = [
    *("clean the kitchen", "book a table", "write to the bank", "fix the lamp", "plan the trip"),
    *("call the plumber", "buy new shoes", "water the plants", "paint the fence", "order a cake"),
]
pets = ["dog", "cat", "horse", "bird"]


def conversation(job, pet):
    return kv.Transcript.from_messages(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"Today I must {job} and feed my {pet}."},
            {"role": "assistant", "content": "Tell me when it is done."},
            {"role": "user", "content": "It is done. What did I feed?"},
            {"role": "assistant", "content": ["You fed your ", {"text": pet, "name": "answer"}, "."]},
        ],
        names=["system", "secret", "reply", "question", "recall"],
    )


# %% [markdown]
# ## The design
#
# Each job is a *context*, and the animals are drawn at random within it. No animal belongs to one job, so a probe
# cannot infer one from the other. The part named `answer` is never read by a probe. The model is asked for it.

# %%
rng = np.random.default_rng(0)
cells = [(job, pet) for job in jobs for pet in rng.choice(pets, 4)]
transcripts = [conversation(job, pet) for job, pet in cells]
design = kv.Design.labelled(
    transcripts, labels=[pet for _, pet in cells], contexts=[job for job, _ in cells], name="pet"
)
design

# %% [markdown]
# ## The probe
#
# Probes read the values (`v`) of every layer at the segment `recall`. When it begins, `secret` is masked. What they
# read can only have come through `reply` and `question`, which were computed with the secret in view.

# %%
probing = kv.probe(model, design, at="recall", hide=["secret"], families=["v"], folds=4, permutations=19)
probing

# %% [markdown]
# Each split asks another question. `random`: is it there, in conversations that the probe knows? `leave-context-out`:
# can it be read without knowing the conversation? `paired`: is it there in the same directions everywhere, once each
# conversation's mean is subtracted?
#
# Below `retained` stand the floors. `restart` has the same tokens, computed without the secret: what is read there is
# no leak. `hash control` is a label that can only be memorised. A split is `decodable` if the lead over the floor has
# an interval above zero and permuted labels are read significantly worse.

# %%
kv.plots.leak(probing)

# %% [markdown]
# ## Does the model use it?
#
# `margin` is how much more likely the true answer is than the other animals of its context, in nats. In the restart,
# where nothing is known of the animal, it is zero.

# %%
probing.use.groupby("condition", sort=False)[["margin", "token_accuracy"]].mean().round(3)

# %% [markdown]
# ## What does it print when there is nothing?
#
# A control with a known answer: at `reply`, the secret is masked before anything was computed after it. Nothing can
# have leaked.

# %%
kv.probe(model, design, at="reply", hide=["secret"], families=["v"], folds=4, permutations=19)

# %% [markdown]
# **Reading.** The animal can be read from the values of `recall` in known conversations, and along directions that
# conversations share. For conversations that the probe has never seen, ten contexts do not decide it. The model makes
# little use of it: its margin is a small part of what it is with everything in view, and it names the right animal no
# more often than after a restart. Where nothing can have leaked, nothing is detected.
#
# **Limits.** Ten contexts and forty conversations of one wording give wide intervals, and on another machine a floor
# may differ by a conversation or two. A probe that succeeds does not
# prove use, and one that fails does not prove absence. `kvprobe run leakage` and `kvprobe run use` ask the same of many
# conversations. To start from here, replace `conversation`, `jobs` and `pets` by your own.
