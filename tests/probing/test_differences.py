"""Differences from the restart: what the hidden text changed, without round-off."""

import dataclasses

import numpy as np
import torch

from kvprobe.inference.model import Model
from kvprobe.probes.card import CARD_SPLITS, Measure, ProbeInput, Training
from kvprobe.probes.probe import Probe
from kvprobe.probing.differences import difference, less_restart
from kvprobe.probing.features import Features
from kvprobe.text.transcript import Transcript
from tests.probes.made_probes import TARGET, made_probe
from tests.refusals import refused

CONTEXTS = np.repeat(np.arange(15), 16)
LESS = ProbeInput("v", 2, None, "mean", less_restart=True)


def conversations() -> tuple[Features, Features]:
    """Labels that slightly move the strong vector of their conversation; and the restart, one row per conversation."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (2, 240), generator=generator)
    conversation = 30 * torch.randn(15, 1, 2, 16, generator=generator)
    tensor = conversation[torch.from_numpy(CONTEXTS)] + 0.3 * torch.randn(240, 1, 2, 16, generator=generator)
    for place, row in enumerate(labels):
        tensor[torch.arange(240), 0, 0, 3 * place + row] += 2
    features = Features.of_read_outs({"v": tensor}, np.arange(240), labels, CONTEXTS, TARGET)
    return features, Features.of_read_outs({"v": conversation}, CONTEXTS, labels, CONTEXTS, TARGET)


def test_round_off_and_the_restart_itself_give_zero_difference():
    features = torch.randn(5, 16) * 1000
    nudged = features * (1 + 1e-6)
    assert not difference(features, nudged).any()
    torch.testing.assert_close(difference(features + 1, features), torch.ones(5, 16), rtol=1e-3, atol=1e-3)
    features, restart = conversations()
    changed = less_restart(features, restart)
    assert torch.equal(
        changed.at("v", changed.sites["v"][0])[0, 3], features.tensors["v"][3, 0] - restart.tensors["v"][0, 0]
    )
    assert not any(bool(tensor.any()) for tensor in less_restart(restart, restart).tensors.values())
    other = dataclasses.replace(restart, labels=restart.labels.flip(0))
    refused(lambda: less_restart(features, other), "different sites or samples")


def test_a_probe_of_differences_reads_unseen_conversations_that_a_probe_of_slots_cannot(tiny_llama: Model):
    features, restart = conversations()
    site = features.sites["v"][0]
    seen, fresh = features.at("v", site)[0], restart.at("v", site)[0]
    training = Training("leakage", "a digit", "T3", "retained")
    measures = [Measure("accuracy", split, 0.6, 0.5, 0.7) for split in CARD_SPLITS]
    old, new = CONTEXTS < 10, CONTEXTS >= 10
    right = {}
    for probe_input in (ProbeInput("v", 2, None, "mean"), LESS):
        arguments = (seen[old], features.labels[:, old], CONTEXTS[old], TARGET, probe_input, training, measures)
        probe = Probe.fit(tiny_llama, *arguments, restart=fresh[old])
        predicted = probe.probabilities(probe.features(seen[new], fresh[new])).argmax(-1)
        right[probe_input.less_restart] = float(predicted.T.eq(features.labels[:, new]).double().mean())
    assert right[False] < 0.6
    assert right[True] > 0.9
    assert probe.name == "llamaforcausallm-digit-t3-less-restart"
    nothing = probe.features(fresh, fresh)
    torch.testing.assert_close(probe.probabilities(nothing), probe.base_rates.expand(240, -1, -1))
    refused(lambda: Probe.fit(tiny_llama, *arguments), "needs the restart's features")


def test_a_cache_is_read_less_its_restart(tiny_llama: Model):
    chat = Transcript.from_messages(
        [{"role": "user", "content": "the shed has 2."}, {"role": "assistant", "content": "a shed it is"}], ["T1", "T2"]
    )
    probe = made_probe(tiny_llama, LESS)
    retained, fresh = tiny_llama.prefill(chat).mask("T1"), tiny_llama.prefill(chat.without("T1"))
    changed = probe.site_shows(retained, "T2") - probe.site_shows(fresh, "T2")
    expected = probe.probabilities(changed)
    torch.testing.assert_close(probe.read(tiny_llama, retained, "T2", restart=fresh), expected)
    refused(lambda: probe.read(tiny_llama, retained, "T2"), "give the restart's slots")
