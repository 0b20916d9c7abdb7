"""What answers follow when a summary is exchanged, in the model whose answer is known."""

import numpy as np
import pandas as pd

import kvprobe
from kvprobe.patching import payload_or_pointer
from kvprobe.tasks.ordinal import draw_exchanged


def test_answers_of_the_trained_model_follow_what_it_was_trained_to_hold():
    model, rng = kvprobe.load("ordinal", device="cpu", dtype="float32"), np.random.default_rng(0)
    tables = {}
    for reference in ("payload", "pointer"):
        memos = [draw_exchanged("held_out", rng, (reference,)) for _ in range(30)]
        tables[reference] = payload_or_pointer(model, memos).groupby("arm")[["payload", "pointer"]].mean() > 0.9
    both = pd.concat(tables).swaplevel()
    assert both.loc["seen"].to_numpy().all()
    assert both.loc["crossed"].to_numpy().tolist() == [[True, False], [False, True]]
    assert both.loc["masked"]["payload"].tolist() == [True, False]
