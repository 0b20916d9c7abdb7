"""Splicing: a perfect reconstruction changes nothing, and the mean activation does; and the texts that a latent is
active in."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvprobe.inference.model import Model
from kvprobe.report.views.latents import latent_page, latent_view, latents_table, peak_words
from kvprobe.saes import Dictionary, Place, Shards, activating, judge, reconstruction, record, recovered, splice
from kvprobe.saes.quality import by_density
from kvprobe.text.tokens import Tokens
from tests.refusals import refused
from tests.saes.planted import PLACE, TEXT, planted

TEXTS = [Tokens.of([(7 * number + step * step) % 60 for step in range(20 + number)]) for number in range(3)]
PLACES = [Place("resid_post", 1), Place("v", 1), Place("k_pre", 1), Place("mlp_out", 0)]


def identity(dim: int) -> Any:
    """An SAE of sae-lens that gives back what it is given: for each number one latent for each sign."""
    from sae_lens import StandardSAE, StandardSAEConfig

    sae = StandardSAE(StandardSAEConfig(d_in=dim, d_sae=2 * dim))
    signs = torch.cat([torch.eye(dim), -torch.eye(dim)])
    with torch.no_grad():
        sae.W_dec.copy_(signs)
        sae.W_enc.copy_(signs.T)
        sae.b_enc.zero_()
        sae.b_dec.fill_(0.3)
    return sae


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_perfect_dictionary_leaves_the_loss_unchanged_and_the_mean_does_not(tiny_llama: Model, place: Place):
    dictionary = Dictionary(identity(place.width(tiny_llama.geometry)), place)
    spliced = splice(tiny_llama, dictionary, TEXTS)
    assert (spliced["spliced"] - spliced["clean"]).abs().max() < 1e-3
    assert spliced["kl_spliced"].abs().max() < 1e-4
    assert (spliced["kl_mean"] > 1e-3).all()
    assert recovered(spliced) == pytest.approx(1, abs=1e-2)
    assert spliced["predicted"].tolist() == [len(text) - 2 for text in TEXTS]
    made = reconstruction(tiny_llama, dictionary, TEXTS)
    assert made.unexplained < 1e-6
    assert made.active == pytest.approx(dictionary.dim)


def test_latents_are_counted_by_the_logarithm_of_their_density():
    assert by_density(np.array([0.0, 0.0011, 0.0012, 0.2, 0.99]), 1.0) == {-3.0: 2, -2.0: 0, -1.0: 2}


def test_a_judgement_holds_the_rotated_control_and_splices_the_first_texts(tiny_llama: Model):
    dictionary = Dictionary(identity(32), PLACES[0])
    texts = judge(tiny_llama, dictionary, TEXTS, 0, 2).texts
    # Rotated, signed directions still are a perfect dictionary: the table is that of `reconstruction`.
    assert texts["turned"].max() < 1e-3 * texts["variance"].min()
    assert texts["spliced"].notna().tolist() == [True, True, False]
    assert texts["clean"][0] == splice(tiny_llama, dictionary, TEXTS[:2])["clean"][0]


def test_the_clean_loss_is_that_of_the_model(tiny_llama: Model):
    dictionary = Dictionary(identity(32), PLACES[0])
    spliced = splice(tiny_llama, dictionary, TEXTS[:1])
    ids = torch.tensor([TEXTS[0].ids])
    with torch.no_grad():
        logits = tiny_llama.lanes.plain(input_ids=ids).logits[0, 1:-1]
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 2:], reduction="sum")
    assert spliced["clean"][0] == pytest.approx(float(expected), rel=1e-4)


def test_splicing_leaves_the_first_slot_alone(tiny_llama: Model):
    dictionary = Dictionary(identity(32), PLACES[0])
    with torch.no_grad():
        dictionary.sae.W_dec.zero_()
    tensor = torch.randn(2, 5, 32)
    edited = dictionary.splicing()(tensor)
    assert torch.equal(edited[:, 0], tensor[:, 0])
    assert torch.allclose(edited[:, 1:], torch.tensor(0.3))


def test_texts_that_are_too_short_to_predict_anything_are_refused(tiny_llama: Model):
    dictionary = Dictionary(identity(32), PLACES[0])
    refused(lambda: splice(tiny_llama, dictionary, [Tokens.of([1, 2])]), "3 tokens or more")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_examples_of_a_latent_are_the_peaks_of_different_texts(tmp_path: Path, dtype: torch.dtype):
    shards, _ = planted(tmp_path / "shards", shards=2, tokens=500)
    dictionary = Dictionary(identity(16).to(dtype), PLACE)
    activations = torch.cat(list(shards.activations(PLACE)))
    (activity,) = activating(dictionary, shards, [5], examples=4)
    values = dictionary.encode(activations)[:, 5]
    assert activity.density == pytest.approx(float((values > 0).double().mean()))
    peaks = values.view(-1, TEXT).max(1).values.sort(descending=True).values[:4]
    assert [example.values[example.peak] for example in activity.examples] == peaks.tolist()
    assert all(max(example.values) == example.values[example.peak] for example in activity.examples)
    assert all(len(example.ids) == len(example.values) <= 19 for example in activity.examples)


def test_a_passage_that_several_texts_share_is_shown_once(tiny_llama: Model, tmp_path: Path):
    shards = record(tiny_llama, [TEXTS[2], TEXTS[0], TEXTS[2]], PLACES[:1], tmp_path / "shards")
    dictionary = Dictionary(identity(32), PLACES[0])
    for activity in activating(dictionary, shards, range(64)):
        assert len({example.ids for example in activity.examples}) == len(activity.examples) <= 2


def test_a_latent_that_is_never_active_has_no_examples_and_no_view(tmp_path: Path, tiny_llama: Model):
    shards, _ = planted(tmp_path / "shards", shards=1, tokens=100)
    dictionary = Dictionary(identity(16), PLACE)
    # All that was planted lies far above zero, where the latents of the other sign are silent.
    (activity,) = activating(dictionary, shards, [16 + 5])
    assert (activity.density, activity.examples) == (0.0, ())
    assert peak_words(activity, tiny_llama.tokenizer) == "none"
    assert latents_table([activity], tiny_llama.tokenizer)[["words", "view"]].values.tolist() == [["none", "null"]]
    refused(lambda: latent_view(activity, tiny_llama.tokenizer), "active nowhere")
    refused(lambda: activating(dictionary, shards, [32]), "no latent 32")


class Hostile:
    """A tokenizer whose every token would be markup."""

    def decode(self, ids: list[int]) -> str:
        return "</script><img src=x onerror=alert(1)>\n" if ids[0] % 2 else "<b>"


def test_a_page_of_latents_escapes_the_text_of_tokens(tiny_llama: Model, tmp_path: Path):
    shards: Shards = record(tiny_llama, TEXTS, PLACES[:1], tmp_path / "shards")
    dictionary = Dictionary(identity(32), PLACES[0])
    latents = activating(dictionary, shards, [0, 40, 3])
    page = (
        latent_page(latents, Hostile(), "Features <i>", ["seen <u>", "", ""]).save(tmp_path / "page.html").read_text()
    )
    assert page.count('data-component="ColoredTokensMulti"') == len([latent for latent in latents if latent.examples])
    for markup in ("<img src=x", "<i>", "<u>", "<b>"):
        assert markup not in page
    assert "Latent 0" in page
