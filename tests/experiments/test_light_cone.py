"""The light cone's control fails where slots vary that cannot."""

import pandas as pd
import pytest

from kvprobe.experiments.light_cone import light_cone
from kvprobe.report.findings import Findings


@pytest.mark.parametrize(("first", "holds"), [(1e-6, True), (1e-3, False)])
def test_slots_that_vary_where_they_cannot_fail_the_control(first: float, holds: bool):
    variation = pd.DataFrame({"layer": [0, 1, 2, 1, 3], "variation": [0.0, first, 0.5, 1e-9, 0.2]})
    findings = Findings()
    control = light_cone(findings, "reach", variation, 1e-5, "K at layers 0 and 1 cannot depend on the code")
    assert control.holds == holds
    assert findings.at("reach", layers="0 and 1").mean == first
    assert findings.at("reach", layers="last").mean == 0.2
