"""What is answered of a code with cells of the cache holding something else, against reading each such cache alone."""

import pytest
import torch

from kvprobe.inference.model import Model
from kvprobe.patching import Cell
from kvprobe.studies.use.code_answers import code_answers
from kvprobe.text.tokens import Tokens

CODES = torch.tensor([[3, 4], [5, 6], [7, 4]])


def test_each_cell_answers_as_the_cache_that_holds_it(tiny_llama: Model):
    base, donor = (tiny_llama.prefill(Tokens.of([9, 8, *code, 11, 12])) for code in CODES[:2].tolist())
    suffix = Tokens.of([20, 21, 3], "T3", 6)
    layers = tuple(range(tiny_llama.geometry.n_layers))
    cells = [
        Cell(layers[1:], (2, 3), "V", content="donor", labels={"name": "some"}),
        Cell(layers, (2, 3, 4, 5), "KV", content="donor", labels={"name": "all"}),
        Cell(layers, (2, 3), "KV", content="itself", labels={"name": "none"}),
    ]
    contents = {"donor": donor, "itself": base}
    rows = code_answers(tiny_llama.lanes, base, donor, contents, cells, suffix, CODES).set_index("name")
    caches = {
        "some": base.patch(donor, slots=[2, 3], layers=layers[1:], part="V"),
        "all": donor,
        "none": base,
    }
    clean = tiny_llama.extend(base, suffix, logits=2)[1][0].log_softmax(-1)
    for name, cache in caches.items():
        logits = tiny_llama.extend(cache, suffix, logits=2)[1][0]
        scores = logits.log_softmax(-1)
        of_codes = scores.gather(1, CODES.T).sum(0)
        row = rows.loc[name]
        assert row["margin"] == pytest.approx(float(of_codes[0] - of_codes[1:].mean()), abs=1e-4)
        assert row["kl"] == pytest.approx(float((clean[0].exp() * (clean[0] - scores[0])).sum()), abs=1e-4)
        assert row["difference"] == pytest.approx(float(logits[0, 3] - logits[0, 5]), abs=1e-4)
        right = scores.argmax(-1) == CODES[0]
        assert (row["right"], row["said"]) == (float(right.double().mean()), bool(right.all()))
    assert rows["intact_margin"].nunique() == 1
    assert rows.loc["none", "intact_margin"] == pytest.approx(rows.loc["none", "margin"], abs=1e-5)
    assert rows.loc["all", "difference"] == pytest.approx(rows.loc["all", "donor_difference"], abs=1e-4)
    assert abs(rows.loc["some", "margin"] - rows.loc["none", "margin"]) > 1e-3
