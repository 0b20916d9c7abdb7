"""Dictionaries: trained ones find what was planted, saved ones come back the same, and what does not fit is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvprobe.inference.model import Model
from kvprobe.saes import Dictionary, Place, Recipe, Shards, shipped_dictionaries, train
from kvprobe.saes.training import Kind
from tests.models import llama
from tests.refusals import refused
from tests.saes.planted import ACTIVE, DIM, PLACE, PLANTED, planted

KINDS: tuple[Kind, ...] = ("topk", "jumprelu")


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> tuple[Shards, torch.Tensor]:
    return planted(tmp_path_factory.mktemp("planted") / "shards")


@pytest.fixture(scope="module")
def trained(recording: tuple[Shards, torch.Tensor]) -> dict[str, Dictionary]:
    return {
        kind: train(recording[0], PLACE, Recipe(kind, 32, ACTIVE, 150_000, batch=200, learning_rate=1e-2), "planted")
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def fitting() -> Model:
    """A model whose residual stream is as wide as what was planted."""
    return llama(hidden_size=DIM, num_attention_heads=2, num_key_value_heads=1)


def unexplained(dictionary: Dictionary, activations: torch.Tensor) -> float:
    error = (dictionary.reconstruct(activations) - activations).square().sum()
    return float(error / (activations - activations.mean(0)).square().sum())


@pytest.mark.parametrize("kind", KINDS)
def test_training_finds_the_planted_directions(
    recording: tuple[Shards, torch.Tensor], trained: dict[str, Dictionary], kind: str
):
    shards, directions = recording
    dictionary = trained[kind]
    activations = torch.cat(list(shards.activations(PLACE)))
    assert unexplained(dictionary, activations) < 0.1
    # Turned at random, the same dictionary has all of this but its truth.
    assert unexplained(dictionary.rotated(0), activations) > 5 * unexplained(dictionary, activations)
    cosines = torch.nn.functional.normalize(dictionary.directions, dim=1) @ directions.T
    assert (cosines.max(0).values > 0.95).sum() >= 0.9 * PLANTED
    active = float((dictionary.encode(activations) != 0).sum(1).float().mean())
    assert active == pytest.approx(ACTIVE, rel=0.25)


def test_the_same_seed_trains_the_same_dictionary(recording: tuple[Shards, torch.Tensor]):
    recipe = Recipe(width=24, active=ACTIVE, tokens=2000, batch=100)
    torch.manual_seed(1)
    one, state = train(recording[0], PLACE, recipe, "planted"), torch.random.get_rng_state()
    torch.manual_seed(2)
    other = train(recording[0], PLACE, recipe, "planted")
    assert torch.equal(one.sae.W_dec, other.sae.W_dec)
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_dictionary_is_read_alike_by_kvprobe_and_sae_lens(
    recording: tuple[Shards, torch.Tensor], trained: dict[str, Dictionary], kind: str, fitting: Model, tmp_path: Path
):
    from sae_lens import SAE

    activations = next(recording[0].activations(PLACE))
    folder = trained[kind].save(tmp_path / "saved")
    with pytest.warns(UserWarning, match="trained on another model"):
        loaded = Dictionary.load(folder, fitting)
    assert loaded.place == PLACE
    for read in (loaded, Dictionary(SAE.load_from_disk(folder), PLACE)):
        latents, expected = read.encode(activations), trained[kind].encode(activations)
        assert float((read.decode(latents) - trained[kind].decode(expected)).abs().max()) < 1e-3
        assert ((latents != 0) == (expected != 0)).float().mean() > 0.9999
    # What was loaded can be saved again.
    again = loaded.save(tmp_path / "again")
    assert (again / "sae_weights.safetensors").read_bytes() == (folder / "sae_weights.safetensors").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_reconstruction_is_the_sum_of_its_latents_directions(
    recording: tuple[Shards, torch.Tensor], trained: dict[str, Dictionary], kind: str
):
    activations = next(recording[0].activations(PLACE))
    for dictionary in (trained[kind], trained[kind].rotated(3)):
        latents = dictionary.encode(activations)
        bias = dictionary.decode(torch.zeros(1, dictionary.width))
        torch.testing.assert_close(
            dictionary.decode(latents), latents @ dictionary.directions + bias, rtol=1e-4, atol=1e-3
        )


def saved_as(dictionary: Dictionary, folder: Path, **changes: Any) -> Path:
    """Its files, with other entries in the config."""
    dictionary.save(folder)
    config = json.loads((folder / "cfg.json").read_text())
    metadata = {**config["metadata"], **changes.pop("metadata", {})}
    (folder / "cfg.json").write_text(json.dumps({**config, **changes, "metadata": metadata}))
    return folder


@pytest.mark.filterwarnings("ignore:The SAE was trained on another model")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"metadata": {"hook_name": "blocks.7.hook_resid_post"}},
            "reads layer 7, but LlamaForCausalLM has layers 0 to 2",
        ),
        ({"metadata": {"hook_name": "blocks.1.attn.hook_z"}}, "which kvprobe does not read"),
        ({"metadata": {"hook_name": None}}, "does not say which hook"),
        ({"metadata": {"hook_head_index": 2}}, "reads single heads"),
        ({"metadata": {"hook_name_out": "blocks.1.hook_mlp_out"}}, "transcoder"),
        ({"normalize_activations": "expected_average_only_in"}, "scaled by a factor"),
    ],
)
def test_a_dictionary_that_belongs_elsewhere_is_refused(
    trained: dict[str, Dictionary], fitting: Model, tmp_path: Path, changes: dict[str, Any], said: str
):
    refused(lambda: Dictionary.load(saved_as(trained["topk"], tmp_path / "saved", **changes), fitting), said)


def test_two_dictionaries_of_a_place_are_refused(trained: dict[str, Dictionary], fitting: Model, tmp_path: Path):
    folders = [str(trained[kind].save(tmp_path / kind)) for kind in KINDS]
    with pytest.warns(UserWarning, match="trained on another model"):
        refused(lambda: Dictionary.load_all(folders, fitting), f"Two dictionaries read {PLACE}")


def test_a_dictionary_of_the_wrong_width_is_refused_in_one_sentence(
    trained: dict[str, Dictionary], tiny_llama: Model, tmp_path: Path
):
    folder = trained["topk"].save(tmp_path / "saved")
    expected = (
        "The SAE reads 16 numbers a token, but resid_post.1 of LlamaForCausalLM has 32; "
        "give one that was trained there."
    )
    assert refused(lambda: Dictionary.load(folder, tiny_llama), "The SAE reads") == expected
    refused(lambda: trained["topk"].encode(torch.zeros(2, 15)), "reads 16 numbers a token, but activations have 15")


def test_files_that_are_not_a_dictionary_are_refused(trained: dict[str, Dictionary], fitting: Model, tmp_path: Path):
    refused(lambda: Dictionary.load(tmp_path, fitting), "no SAE")
    refused(lambda: Dictionary.load("resid", fitting), "no dictionary or sae-lens folder called 'resid'")
    folder = trained["topk"].save(tmp_path / "cut")
    weights = folder / "sae_weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    refused(lambda: Dictionary.load(folder, fitting), "cannot be loaded")


def test_a_dictionary_that_is_not_finite_is_refused_by_name(
    trained: dict[str, Dictionary], fitting: Model, tmp_path: Path
):
    folder = trained["topk"].save(tmp_path / "nan")
    weights = load_file(folder / "sae_weights.safetensors")
    weights["W_dec"][2, 3] = torch.nan
    save_file(weights, folder / "sae_weights.safetensors")
    refused(lambda: Dictionary.load(folder, fitting), "tensor W_dec of the SAE has NaN or infinity")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "topp"}, "did you mean 'topk'"),
        ({"active": 0}, "number of latents; got 0"),
        ({"active": 2000}, "number of latents; got 2000"),
        ({"tokens": 100}, "a batch of 1 to 100 tokens"),
        ({"learning_rate": 0.0}, "a rate of 0.0"),
    ],
)
def test_recipes_that_train_nothing_are_refused(unchecked: None, settings: dict[str, Any], words: str):
    refused(lambda: Recipe(**settings), words)


def test_activations_that_do_not_vary_are_refused(tmp_path: Path):
    from safetensors.torch import load_file, save_file

    shards, _ = planted(tmp_path / "shards", shards=1)
    tensors = load_file(shards.files[0])
    save_file({**tensors, str(PLACE): torch.full_like(tensors[str(PLACE)], 3.0)}, shards.files[0])
    refused(lambda: train(shards, PLACE, Recipe(tokens=1000, batch=100), "planted"), "do not vary")


def test_half_precision_weights_differ_only_by_rounding(
    recording: tuple[Shards, torch.Tensor], trained: dict[str, Dictionary], fitting: Model, tmp_path: Path
):
    whole, half = (trained["topk"].save(tmp_path / name, half=name == "half") for name in ("whole", "half"))
    sizes = [(folder / "sae_weights.safetensors").stat().st_size for folder in (whole, half)]
    assert sizes[1] < 0.6 * sizes[0]
    with pytest.warns(UserWarning, match="trained on another model"):
        read = Dictionary.load(half, fitting)
    assert read.sae.W_dec.dtype == torch.float32
    activations = next(recording[0].activations(PLACE))
    assert unexplained(read, activations) == pytest.approx(unexplained(trained["topk"], activations), rel=0.02)


def test_shipped_dictionaries_fit_the_model_that_they_were_trained_on(smol: Model, recwarn: pytest.WarningsRecorder):
    assert shipped_dictionaries()
    for name in shipped_dictionaries():
        dictionary = Dictionary.load(name, smol)
        assert dictionary.dim == dictionary.place.width(smol.geometry)
    assert not [warning for warning in recwarn if "trained on another model" in str(warning.message)]


@pytest.mark.parametrize("named", ["gpt2-small", "google/gemma-2-2b"])
def test_a_dictionary_whose_metadata_name_another_model_is_warned_of(
    named: str, trained: dict[str, Dictionary], fitting: Model, tmp_path: Path
):
    folder = saved_as(trained["topk"], tmp_path / "saved", metadata={"model_name": named, "kvprobe_model": None})
    with pytest.warns(UserWarning, match=f"trained on '{named}', and this model is"):
        Dictionary.load(folder, fitting)


@pytest.mark.parametrize("named", ["LlamaForCausalLM", "org/llamaforcausallm-base", None])
def test_a_dictionary_of_this_model_or_of_none_is_loaded_without_a_word(
    named: str | None, trained: dict[str, Dictionary], fitting: Model, tmp_path: Path, recwarn: pytest.WarningsRecorder
):
    folder = saved_as(trained["topk"], tmp_path / "saved", metadata={"model_name": named, "kvprobe_model": None})
    Dictionary.load(folder, fitting)
    assert not [warning for warning in recwarn if "trained on" in str(warning.message)]


def test_a_dictionary_without_a_hook_name_takes_the_place_given(
    trained: dict[str, Dictionary], fitting: Model, tmp_path: Path
):
    folder = saved_as(trained["topk"], tmp_path / "saved", metadata={"hook_name": None, "kvprobe_model": None})
    assert Dictionary.load(folder, fitting, Place("mlp_out", 2)).place == Place("mlp_out", 2)
