"""Items of tasks answered under many faults, kept sample by sample, so that an interrupted run resumes."""

from collections.abc import Callable, Sequence

import pandas as pd

from kvprobe.experiments.parts import table_of_parts
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.inference.trials import Case, Sample, answer
from kvprobe.tasks.task import Task, prompt


def collect_trials(
    model: Model,
    run: Run,
    tasks: Sequence[Task],
    count: int,
    seed: int,
    cases_of: Callable[[Sample], Sequence[Case]],
    *,
    follow: bool = True,
) -> pd.DataFrame:
    """All samples of all tasks under all cases; see `kvprobe.inference.trials.answer` for the columns.

    Args:
        count: items of each task.
        cases_of: the cases of a sample.
    """
    items = [(task, item) for task in tasks for item in task.items(count, seed)]

    def answered(number: int) -> pd.DataFrame:
        task, item = items[number]
        sample = Sample(task, item, number, prompt(item, model.tokenizer))
        return pd.DataFrame(answer(model, sample, cases_of(sample), seed, follow=follow))

    numbers = range(len(items))
    return table_of_parts(run, numbers, "answers", answered, doing="Damaging and answering", unit="prompt")
