"""The embedded model's cache, out of llama.cpp and back."""

import pytest

from kvprobe.cli.caches import engines
from kvprobe.engines import round_trip
from kvprobe.engines.round_trip import llamacpp_round_trip


def test_a_cache_goes_out_of_llama_cpp_and_back_and_an_edit_goes_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    trip = llamacpp_round_trip("smollm2-135m")
    assert trip.restored <= 1e-6
    assert "4821" in trip.answer
    assert "4821" not in trip.hidden_answer
    assert max(trip.apart, trip.hidden_apart) < 0.1 * trip.moved
    monkeypatch.setattr(round_trip, "llamacpp_round_trip", lambda _: trip)
    engines()
    shown = capsys.readouterr().out
    assert trip.answer in shown
    assert "make engines" in shown
