"""Contexts with codes of their own."""

import numpy as np

from kvprobe.tasks.passcode import coded_contexts
from tests.models import tiny_tokenizer


def test_no_code_serves_twice_and_a_pair_differs_in_its_first_digit():
    cases = coded_contexts(6, 4, np.random.default_rng(0), tiny_tokenizer())
    assert [case.number for case in cases] == list(range(6))
    fitted = [code for case in cases for code in case.codes]
    owns = [case.pair[0] for case in cases]
    assert len(set(fitted + owns)) == len(fitted) + len(owns) == 6 * 5
    assert all(case.pair[0][0] != case.pair[1][0] and case.pair[1] not in fitted + owns for case in cases)
