"""Names and errors in sentences."""

import inspect
from collections.abc import Callable

import pytest

import kvprobe as kv
from kvprobe.names import LISTED, one_line, unknown


def test_an_error_of_several_lines_becomes_part_of_a_sentence():
    assert one_line(ValueError("a mapping is needed,\n   in line 2.\n")) == "a mapping is needed, in line 2"
    assert one_line(ValueError("x" * 1000)) == "x" * 200
    assert one_line(ValueError()) == ""


def test_an_unknown_name_meets_the_known_ones_but_not_endlessly():
    names = [f"n{number}" for number in range(LISTED)]
    assert unknown("thing", "xyz", names).endswith("'n31'.")
    assert unknown("thing", "xyz", [*names, "a", "b"]).endswith("'n31' and 2 more.")


def test_an_unknown_keyword_names_its_near_match():
    with pytest.raises(TypeError, match=r"budget: There is no argument called 'contex'; did you mean 'context'\?"):
        kv.budget("smollm2-135m", contex=100)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match=r"KVCache\.mask: .* did you mean 'slots'"):
        kv.KVCache.mask(None, slot=[1])  # pyright: ignore[reportCallIssue, reportArgumentType]
    for call in (kv.compare, kv.probe, kv.scan, kv.attention.dangling):
        with pytest.raises(TypeError, match=r"no argument called 'mask'; did you mean 'hide'\?"):
            call(mask=["T1"])  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    "function",
    [
        *(
            kv.attribute,
            kv.budget,
            kv.compare,
            kv.layer_map,
            kv.load,
            kv.patch_pairs,
            kv.patch_sweep,
            kv.probe,
            kv.scan,
        ),
        *(kv.Model.prefill, kv.Model.extend, kv.Model.generate, kv.Model.sweep, kv.Model.capture),
        *(kv.KVCache.mask, kv.KVCache.evict),
    ],
)
def test_every_call_with_keywords_names_near_ones_and_keeps_its_signature(function: Callable[..., object]):
    *_, last = inspect.signature(function).parameters
    with pytest.raises(TypeError, match=f"did you mean '{last}'"):
        function(**{f"{last}e": 0})
