"""What a study costs beside what it measures: the preset robustness-quick as a study, and its answers in a bare loop.

Both answer the same prompts under the same faults, with the same model in one process, and must give the same rows.
The framework's own share (the beginning of a run with the model's fingerprint, parts that let it resume, tables,
findings) is to be under 3 % of the whole preset's answers; with fewer items its beginning weighs more. Figures and the
page are the report. All times are CPU seconds of this process, so that other work does not count.

    python benchmarks/framework.py
"""

import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from timing import Row, main

import kvprobe as kv
from kvprobe.experiments import running
from kvprobe.experiments.settings import from_mapping
from kvprobe.inference.trials import AskedItem, answer
from kvprobe.presets import presets
from kvprobe.studies import answers, find
from kvprobe.studies.robustness import Config
from kvprobe.studies.robustness.collect import cases
from kvprobe.tasks.task import prompt

PRESET, LIMIT = "robustness-quick", 0.03


def bare(model: kv.Model, config: Config) -> pd.DataFrame:
    """The rows of the study, in a loop that keeps nothing on disk."""
    items = [(task, item) for task in answers.tasks_of(config) for item in task.items(config.samples, config.seed)]
    rows: list[dict[str, Any]] = []
    for number, (task, item) in enumerate(items):
        sample = AskedItem(task, item, number, prompt(item, model.tokenizer))
        rows += answer(model, [(sample, cases(config))], config.seed, follow=config.follow)
    return pd.DataFrame(rows)


class Clock:
    """CPU seconds by what they were spent on; what runs within a timed function does not count for that one as well."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._within = 0.0

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            start, before, self._within = time.process_time(), self._within, 0.0
            try:
                return function(*args, **more)
            finally:
                taken = time.process_time() - start
                self.seconds[name] += taken - self._within
                self._within = before + taken

        return run


def measure(asked: Namespace) -> Iterator[Row]:
    config = from_mapping(Config, presets()[PRESET].settings)
    if asked.quick:
        config = replace(config, samples=2, tasks=config.tasks[:1], rates=config.rates[:1])
    model = kv.load(config.model)
    first = AskedItem(*first_item(model, config)), cases(config)[:2]
    answer(model, [first], config.seed)  # the first pass warms up

    alone, whole = Clock(), Clock()
    rows = alone.timed("answers", bare)(model, config)
    study = find("robustness").declaration
    timed = replace(
        study, collect=whole.timed("parts", study.collect), conclude=whole.timed("findings", study.conclude)
    )
    answers.answer = whole.timed("answers", answer)
    running.draw, running.write_page = whole.timed("figures", running.draw), whole.timed("page", running.write_page)
    with TemporaryDirectory() as folder:
        run = whole.timed("beginning", running.run_study)(timed, config, Path(folder), model=model)
        pd.testing.assert_frame_equal(run.df(), rows, check_dtype=False)
    spent, what = whole.seconds, f"{PRESET}, {len(rows):,} answers"
    shares = {"answers": ("answers",), "framework": ("beginning", "parts", "findings"), "report": ("figures", "page")}
    taken = {name: sum(spent[part] for part in parts) for name, parts in shares.items()}
    loop, note = [alone.seconds["answers"]], ", ".join(f"{name} {seconds:.2f} s" for name, seconds in spent.items())
    yield Row.of(f"{what}: the whole study", "a bare loop", [sum(taken.values())], loop, note=note)
    framework, answered = taken["answers"] + taken["framework"], [taken["answers"]]
    yield Row.of(f"{what}: answers and framework", "its own answers", [framework], answered, most=1 + LIMIT)


def first_item(model: kv.Model, config: Config) -> tuple[Any, ...]:
    task = answers.tasks_of(config)[0]
    item = task.items(config.samples, config.seed)[0]
    return task, item, 0, prompt(item, model.tokenizer)


if __name__ == "__main__":
    main(measure, __doc__)
