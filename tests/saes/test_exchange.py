"""Latents of one run exchanged for another's: which exchange is the whole, which is nothing."""

import pandas as pd
import pytest
import torch

from kvprobe.inference.model import Model
from kvprobe.saes import Dictionary, Place, exchange_latents
from kvprobe.text.tokens import Tokens
from tests.saes.test_quality import identity

SETS = {"all": range(32), "none": []}


def exchanged(model: Model, place: Place) -> pd.Series:
    """KL by what is exchanged: a turn is masked in the one run, and the other never had it."""
    ids = torch.randint(2, 60, (16,), generator=torch.Generator().manual_seed(2)).tolist()
    start, hidden, asked = Tokens.of(ids[:3], "T1"), Tokens.of(ids[3:9], "T2", 3), Tokens.of(ids[9:], "T3", 11)
    dictionary = Dictionary(identity(place.width(model.geometry)), place)
    wanted = {"families": [place.family], "layers": [place.layer]}
    summary = Tokens.of([40, 41], "summary", 9)
    kept = model.extend(model.prefill(start + hidden), summary)[0].mask("T2")
    never = model.extend(model.prefill(start), summary)[0]
    own, other = (model.capture(asked, **wanted, past=cache, logits=len(asked)) for cache in (kept, never))
    return exchange_latents(model, dictionary, kept, asked, own, other, SETS).set_index("set")["kl"]


def test_all_latents_of_a_perfect_dictionary_are_the_whole_activation_and_none_are_nothing(tiny_llama: Model):
    kl = exchanged(tiny_llama, Place("v", 2))
    assert kl["all"] == pytest.approx(kl["whole"], rel=1e-3)
    assert kl["none"] == pytest.approx(kl["as it is"], rel=1e-6)
    assert abs(kl["whole"] - kl["as it is"]) > 1e-6


def test_after_the_last_layer_the_whole_exchange_is_the_other_run_itself(tiny_llama: Model):
    kl = exchanged(tiny_llama, Place("resid_post", tiny_llama.geometry.n_layers - 1))
    assert kl["as it is"] > 1e-4
    assert kl["whole"] < 1e-6
