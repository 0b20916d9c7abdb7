"""Published probes: the same numbers from memory, folder, cache and capture; untrusted files and other models
refused."""

import dataclasses
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from kvprobe.files import MAX_BYTES
from kvprobe.inference.model import Model, load
from kvprobe.probes import card as probe_card
from kvprobe.probes.card import CARD, WEIGHTS, Card, Measure, ProbeInput
from kvprobe.probes.page import card_page
from kvprobe.probes.probe import Probe
from kvprobe.probing.features import READS, read_outs
from kvprobe.text.transcript import Transcript
from tests.models import llama, tiny_tokenizer
from tests.probes.made_probes import TARGET, made_probe
from tests.refusals import refused

VALUES = ProbeInput("v", 1, None, "mean")
CHAT = Transcript.from_messages(
    [{"role": "user", "content": "the shed has 2."}, {"role": "assistant", "content": "a shed it is"}], ["T1", "T2"]
)


@pytest.fixture
def folder(tiny_llama: Model, tmp_path: Path) -> Path:
    return made_probe(tiny_llama, VALUES).save(tmp_path / "tiny-digit")


def test_a_probe_survives_saving_and_loading(tiny_llama: Model, folder: Path):
    probe, back = made_probe(tiny_llama, VALUES), Probe.load(folder)
    assert back.card == probe.card
    features = torch.randn(4, 3, 16)
    assert torch.equal(back.probabilities(features), probe.probabilities(features))
    assert torch.equal(back.distance(features), probe.distance(features))
    assert back.probabilities(features).shape == (4, 3, 2, 3)
    assert back.probabilities(features[0, 0]).shape == (2, 3)


def test_features_without_information_give_the_base_rates(tiny_llama: Model):
    probe = made_probe(tiny_llama, VALUES)
    torch.testing.assert_close(probe.probabilities(probe.linear.mean[0]), probe.base_rates)
    torch.testing.assert_close(probe.base_rates, torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]]))


def test_a_shipped_probe_loads_by_name_and_a_near_name_is_suggested(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe_card, "shipped", lambda _: folder.parent)
    assert Probe.load("tiny-digit").name == "tiny-digit"
    refused(lambda: Probe.load("tiny-digits"), "did you mean 'tiny-digit'")


def test_an_empty_catalogue_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe_card, "shipped", lambda _: tmp_path)
    refused(lambda: Probe.load("tiny-digit"), "there are none here")


@pytest.mark.parametrize("family", ["k", "v"])
@pytest.mark.parametrize("head", [None, 1])
@pytest.mark.parametrize("read", READS)
def test_a_cache_and_a_capture_are_read_as_the_training_features_were(
    tiny_llama: Model, family: Any, head: int | None, read: Any
):
    probe = made_probe(tiny_llama, ProbeInput(family, 2, head, read))
    captured = tiny_llama.capture(CHAT, [family], segments=["T2"], keep_cache=True)
    stacked = captured.stack(family) if head is None else captured.stack(family)[:, :, head]
    trained_on = read_outs(stacked)[:, 2, READS.index(read)]
    assert torch.equal(probe.site_shows(captured), trained_on)
    assert captured.cache is not None
    torch.testing.assert_close(probe.site_shows(captured.cache, "T2"), trained_on)
    torch.testing.assert_close(probe.read(tiny_llama, captured.cache, "T2"), probe.probabilities(trained_on))


@pytest.mark.parametrize("read", READS)
def test_rows_of_unequal_length_are_read_as_if_alone(tiny_llama: Model, read: Any):
    probe = made_probe(tiny_llama, ProbeInput("resid_post", 1, None, read))
    long = Transcript.from_messages([{"role": "user", "content": "the old mill has 2 of these."}], ["T1"])
    short = Transcript.from_messages([{"role": "user", "content": "the shed has 2."}], ["T1"])
    both = probe.read(tiny_llama, tiny_llama.capture([long, short], ["resid_post"]))
    for row, chat in zip(both, (long, short), strict=True):
        torch.testing.assert_close(row, probe.read(tiny_llama, tiny_llama.capture(chat, ["resid_post"]))[0])
    values = made_probe(tiny_llama, ProbeInput("v", 1, None, read))
    cache = tiny_llama.prefill([long, short])
    alone = tiny_llama.prefill(short)
    torch.testing.assert_close(values.read(tiny_llama, cache, "T1")[1], values.read(tiny_llama, alone, "T1")[0])


def test_other_weights_are_refused_and_another_dtype_of_the_same_is_not(tiny_llama: Model):
    probe = made_probe(tiny_llama, VALUES)
    cache = tiny_llama.prefill(CHAT)
    refused(lambda: probe.read(llama(seed=1, tokenizer=tiny_tokenizer()), cache, "T2"), "differs from it in weights")
    half = load(llama(tokenizer=tiny_tokenizer()).lanes.plain.to(torch.bfloat16), tokenizer=tiny_tokenizer())
    assert half.fingerprint != tiny_llama.fingerprint
    near = probe.read(half, half.prefill(CHAT), "T2")
    assert float((near - probe.read(tiny_llama, cache, "T2")).abs().max()) < 0.1
    other = llama(seed=1, tokenizer=tiny_tokenizer()).lanes.plain.to(torch.bfloat16)
    assert not probe.fits(load(other, tokenizer=tiny_tokenizer()))


def test_another_config_or_tokenizer_over_the_same_weights_is_refused(tiny_llama: Model):
    probe = made_probe(tiny_llama, VALUES)
    turned = llama(tokenizer=tiny_tokenizer()).lanes.plain
    turned.config.rope_parameters = {"rope_type": "default", "rope_theta": 50_000.0}
    other = tiny_tokenizer()
    other.chat_template += " "
    for model, part in {
        load(turned, tokenizer=tiny_tokenizer()): "config or modules",
        load(turned.to(torch.bfloat16), tokenizer=tiny_tokenizer()): "config or modules",
        load(tiny_llama.lanes.plain, tokenizer=other): "tokenizer or chat template",
    }.items():
        refused(lambda model=model: probe.check(model), f"differs from it in {part},")


def test_what_a_probe_cannot_read_is_refused(tiny_llama: Model):
    cache, values = tiny_llama.prefill(CHAT), made_probe(tiny_llama, VALUES)
    stream = made_probe(tiny_llama, ProbeInput("resid_post", 1, None, "mean"))
    captured = tiny_llama.capture(CHAT, ["v"], layers=[1])
    windowed = cache.mask("T1", layers=[1])
    windowed = dataclasses.replace(
        windowed, ledger=dataclasses.replace(windowed.ledger, dropped=cache.ledger.in_segments("T1"))
    )
    assert values.read(tiny_llama, windowed, "T2").isfinite().all()
    for match, read in {
        "name the segment": lambda: values.read(tiny_llama, cache),
        "did you mean 'T2'": lambda: values.read(tiny_llama, cache, "T22"),
        "no slots": lambda: values.read(tiny_llama, cache.evict("T2"), "T2"),
        "had dropped it": lambda: values.read(tiny_llama, windowed, "T1"),
        "no cache holds": lambda: stream.read(tiny_llama, cache, "T2"),
        "capture with segments": lambda: values.read(tiny_llama, captured, "T2"),
        "vectors of 16 numbers; these have 5": lambda: values.probabilities(torch.zeros(2, 5)),
        "finite": lambda: values.probabilities(torch.full((2, 16), torch.nan)),
        "does not have": lambda: made_probe(tiny_llama, ProbeInput("v", 9, None, "mean")).check(tiny_llama),
        "layer 1, head 2": lambda: made_probe(tiny_llama, ProbeInput("v", 1, 2, "mean")).check(tiny_llama),
    }.items():
        refused(read, match)


def changed(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        content = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump(change(content) or content))

    return apply


LAUGHS = "layer: [" + ", ".join(
    [f"&l{level} [{', '.join([f'*l{level - 1}' if level else 'ha'] * 9)}]" for level in range(9)]
)
LAUGHS += "]"

BAD_CARDS = {
    "0 bytes|mapping": lambda path: path.write_text(""),
    "not readable YAML": lambda path: path.write_text("a: [1"),
    "must hold a mapping": lambda path: path.write_text("- 1"),
    "has more bytes": lambda path: path.write_text("a: " + "x" * MAX_BYTES),
    "not readable YAML|UTF-8": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "not readable": lambda path: path.write_text("a: !!python/object/apply:os.system ['true']"),
    "nests deeper": lambda path: path.write_text("a: " + "[" * 5_000),
    "month must be": lambda path: path.write_text("a: 2026-13-45"),
    "aliases": lambda path: path.write_text(path.read_text().replace("layer: 1", LAUGHS)),
    "format": changed(lambda card: card.update(format="kvprobe-probe-1")),
    "not the fingerprint": changed(lambda card: card.update(weights=card["weights"][:16])),
    "'layer' is -1": changed(lambda card: card["site"].update(layer=-1)),
    "'agreed' is 1.5": changed(lambda card: card["training"].update(agreed=1.5)),
    "'contexts' is -3": changed(lambda card: card["training"].update(contexts=-3)),
    "'temperature' is": changed(lambda card: card["training"].update(temperature=[0.0])),
    "'accuracy' is 7": changed(lambda card: card["measures"][0].update(mean=7.0)),
    "interval of accuracy": changed(lambda card: card["measures"][0].update(low=0.9)),
    "lacks 'digest'": changed(lambda card: card.pop("digest") and None),
    "cannot be read as a card": lambda path: path.write_text("a: " + "1:" * 9_000 + "1"),
    "no key of the card called 'weigths'": changed(lambda card: card.update(weigths=1)),
    "lacks 'site'": changed(lambda card: card.pop("site") and None),
    "no key of 'site' called 'code'": changed(lambda card: card["site"].update(code="import os")),
    "'layer' is 'one', a str": changed(lambda card: card["site"].update(layer="one")),
    "'layer' is True": changed(lambda card: card["site"].update(layer=True)),
    "'family' is 'w'": changed(lambda card: card["site"].update(family="w")),
    "'far' is .*finite": changed(lambda card: card["training"].update(far=float("nan"))),
    "cannot be printed": changed(lambda card: card["training"].update(what="\x1b[2Jgone")),
    "at most 600": changed(lambda card: card["training"].update(what="x" * 601)),
    "list of at most": changed(lambda card: card["target"].update(classes=["x"] * 1001)),
    "all of them different": changed(lambda card: card["target"].update(classes=["x", "x"])),
    "cannot be the name": changed(lambda card: card.update(name="../../etc")),
    "no measure called": changed(lambda card: card["measures"][0].update(measure="precision")),
    "no split called": changed(lambda card: card["measures"][0].update(split="rnd")),
    "no accuracy under the random": changed(lambda card: card["measures"].pop(0) and None),
    "twice": changed(lambda card: card["measures"].append(dict(card["measures"][0]))),
}


@pytest.mark.parametrize("match", BAD_CARDS)
def test_a_card_that_was_altered_is_refused_in_a_sentence(folder: Path, match: str, unchecked: None):
    BAD_CARDS[match](folder / CARD)
    refused(lambda: Probe.load(folder), re.compile(match))


def altered(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


BAD_WEIGHTS = {
    "no weights.safetensors": lambda path: path.unlink(),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "truncated or not": lambda path: path.write_bytes(pickle.dumps({"weights": [1]})),
    "truncated or not a": lambda path: path.write_bytes(b""),
    "6 outputs": altered(lambda held: held.update(weights=held["weights"][:, :5].contiguous())),
    "does not hold": altered(lambda held: held.pop("mean")),
    "not hold": altered(lambda held: held.update(more=torch.zeros(1))),
    "hold the weights": altered(lambda held: held.update(deviation=held["deviation"][:3].clone())),
    "not hold the weights": altered(lambda held: held.update(weights=torch.zeros(3))),
    "not float32": altered(lambda held: held.update(mean=held["mean"].double())),
    "not finite": altered(lambda held: held["mean"].fill_(torch.nan)),
    "not above zero": altered(lambda held: held["deviation"].fill_(-1)),
    "does not match the digest": altered(lambda held: held["weights"].mul_(-1)),
}


@pytest.mark.parametrize("match", BAD_WEIGHTS)
def test_weights_that_were_altered_are_refused_in_a_sentence(folder: Path, match: str):
    BAD_WEIGHTS[match](folder / WEIGHTS)
    refused(lambda: Probe.load(folder), match)


def test_a_file_too_large_is_not_opened(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvprobe.probes.weights.MAX_WEIGHTS", 100)
    refused(lambda: Probe.load(folder), "larger than")


def test_the_card_in_words_follows_its_numbers(tiny_llama: Model):
    card = made_probe(tiny_llama, VALUES).card
    assert "it may be used to see" in card_page(card)
    assert "60.0 % (50.0 to 70.0)" in card_page(card)

    def other(*measures: Measure) -> Card:
        split = [measure for measure in card.measures if measure.split != "leave-context-out"]
        return dataclasses.replace(card, measures=(*split, *measures))

    accuracy = Measure("accuracy", "leave-context-out", 0.6, 0.5, 0.7)
    assert "may be called a leak" in card_page(other(accuracy))
    assert "may be called a leak" in card_page(other(accuracy, Measure("leak", "leave-context-out", 0.1, -0.1, 0.3)))
    chance = Measure("accuracy", "leave-context-out", 0.34, 0.3, 0.38)
    assert "it is not a detector" in card_page(other(chance, Measure("leak", "leave-context-out", 0.1, 0.05, 0.3)))
    assert not other(chance).reads_unseen


def test_a_probe_is_shown_to_read_only_where_permuted_labels_are_read_worse(tiny_llama: Model):
    card = made_probe(tiny_llama, VALUES).card

    def with_p(p: float) -> Card:
        return dataclasses.replace(card, measures=(*card.measures, Measure("p", "leave-context-out", p, None, None)))

    assert with_p(0.02).reads_unseen
    assert not with_p(0.2).reads_unseen
    assert "labels permuted within conversations are read as well" in card_page(with_p(0.2))


def test_a_card_of_few_contexts_has_no_intervals_and_no_claim(tiny_llama: Model, tmp_path: Path):
    made = made_probe(tiny_llama, VALUES).card
    few = dataclasses.replace(
        made, measures=tuple(dataclasses.replace(measure, low=None, high=None) for measure in made.measures)
    )
    few.write(tmp_path)
    assert Card.read(tmp_path) == few
    assert not few.reads_unseen
    assert "too few for an interval" in card_page(few)


def test_the_card_in_words_opens_no_markup(tiny_llama: Model):
    card = made_probe(tiny_llama, VALUES).card
    evil = dataclasses.replace(card.training, what="`<script>` | a cell")
    page = card_page(dataclasses.replace(card, training=evil))
    assert "<script>" not in page
    assert "'&lt;script&gt;' \\| a cell" in page
    assert TARGET.name in page
