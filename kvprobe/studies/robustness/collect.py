"""Every fault at every rate, with its controls, as the cases of each prompt.

`kvprobe.inference.trials` answers prompts; this module says which cases there are.
"""

from collections.abc import Sequence
from itertools import product

import pandas as pd

from kvprobe.errors import UserError
from kvprobe.experiments.runs import Run
from kvprobe.faults import NotANumber, Scope
from kvprobe.faults.catalogue import CATALOGUE, REPORTED_FAULTS
from kvprobe.faults.scope import Unit
from kvprobe.inference.model import Model
from kvprobe.inference.sweep import Trial
from kvprobe.inference.trials import AskedItem, Case
from kvprobe.models.geometry import Geometry
from kvprobe.names import unknown
from kvprobe.report.reported import Reported, reported
from kvprobe.studies import answers
from kvprobe.studies.answers import WHEN, collect_answers, tasks_of
from kvprobe.studies.robustness import Config
from kvprobe.studies.settings import TIMINGS, Timing
from kvprobe.tasks.task import Task

PROCEDURE_UNITS: tuple[Unit, ...] = ("slot", "layer", "number")
"""What canarypwn may have meant by an entry of the cache."""
MAIN, PROCEDURE, CONTROL = "main", "procedure", "control"
NOT_A_NUMBER = "nan"
UNITS = {
    "slot": "slots, the same ones in all layers and heads",
    "layer": "slots, in each layer its own",
    "head": "slots, in each layer and KV head its own",
    "number": "single numbers of K and of V, in each layer its own",
}


def inputs(config: Config) -> dict[str, str]:
    """A digest of the items.

    Raises:
        UserError: an unknown fault, task or reported table.
    """
    for name in config.faults:
        if name not in CATALOGUE:
            raise UserError(f"Setting 'faults': {unknown('fault', name, CATALOGUE)}")
    reported_beside(config, tasks_of(config))
    return answers.inputs(config)


def reported_beside(config: Config, tasks: Sequence[Task]) -> Reported | None:
    """The reported table that a config names.

    Raises:
        UserError: it is unknown, or nothing of this study can stand beside it.
    """
    if not config.reported:
        return None
    table = reported(config.reported)
    if not any(table.is_about(task.name) for task in tasks):
        raise UserError(
            f"Setting 'reported' names {table.name!r}, which is about {table.task}, but the tasks are "
            f"{', '.join(config.tasks)}; add that task, or leave 'reported' empty."
        )
    if not set(config.faults) & set(table.rows):
        raise UserError(
            f"Setting 'reported' names {table.name!r}, which has {', '.join(table.rows)}, but the faults are "
            f"{', '.join(config.faults)}; name one of those, or leave 'reported' empty."
        )
    return table


def cases(config: Config) -> list[Case]:
    """The cases of every prompt.

    Labels: `group` (main, procedure or control), `fault`, `rate` (percent), `repeat`, `timing`, `unit` (as drawn).
    """
    repeats, every_case = range(config.repeats), list[Case]()
    for name, rate, repeat in product(config.faults, config.rates, repeats):
        every_case.append(_case(MAIN, name, rate, repeat, config.timing, config.unit))
    if config.procedure > 0:
        for name, timing, unit, repeat in product(REPORTED_FAULTS, TIMINGS, PROCEDURE_UNITS, repeats):
            every_case.append(_case(PROCEDURE, name, config.procedure, repeat, timing, unit))
    every_case.append(_case(CONTROL, config.faults[0], 0.0, 0, config.timing, config.unit))
    one_slot = {"group": CONTROL, "fault": NOT_A_NUMBER, "repeat": 0, "timing": "once", "unit": "slot"}
    every_case.append(Case(one_slot, Trial(NotANumber(scope=Scope(count=1)))))
    return every_case


def collect(model: Model, config: Config, run: Run) -> pd.DataFrame:
    """All prompts of all tasks under all cases; see `kvprobe.inference.trials.answer` for the columns."""
    return collect_answers(model, config, run, of_item)


def of_item(shape: Geometry, config: Config, asked: AskedItem) -> list[Case]:
    """The same cases for every item."""
    return cases(config)


def _case(group: str, name: str, rate: float, repeat: int, timing: Timing, unit: str) -> Case:
    named = CATALOGUE[name]
    drawn = named.unit(unit)
    at, transient = WHEN[timing]
    fault = named.make(scope=Scope(rate=rate / 100, parts=named.parts, unit=drawn), at=at, transient=transient)
    labels = {"group": group, "fault": name, "rate": rate, "repeat": repeat, "timing": timing, "unit": drawn}
    return Case(labels, Trial(fault, repeat))
