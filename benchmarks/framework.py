"""What the framework of studies adds to measuring: the quick robustness preset as a study, beside the same answers in a
bare loop, with equal rows.

Measuring is `kvprobe.inference.trials.answer` for each item. The study adds parts and tables in files, findings with
intervals (these are the framework), and then figures and the page (the report, whose time does not grow with the
items). CPU seconds, of one process and model.

    python benchmarks/framework.py --items 4
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd

import kvprobe as kv
from kvprobe.experiments import running
from kvprobe.experiments.settings import from_mapping
from kvprobe.inference.trials import Sample, answer
from kvprobe.presets import presets
from kvprobe.studies import find, robustness
from kvprobe.studies.answers import tasks_of
from kvprobe.studies.robustness.collect import cases
from kvprobe.tasks.task import prompt

PRESET, LIMIT = "robustness-quick", 0.03
ITEMS = int(presets()[PRESET].settings["samples"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=ITEMS)
    arguments = parser.parse_args()
    settings = {**presets()[PRESET].settings, "samples": arguments.items}
    config = from_mapping(robustness.Config, settings)
    model = kv.load(config.model)
    bare(model, from_mapping(robustness.Config, {**settings, "samples": 2}))  # warms up

    spent = {"measuring": 0.0, "figures": 0.0, "page": 0.0}
    study = find("robustness").declaration
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple(
            running,
            draw=timed(running.draw, spent, "figures"),
            write_page=timed(running.write_page, spent, "page"),
        ),
        mock.patch("kvprobe.studies.answers.answer", timed(answer, spent, "measuring")),
    ):
        start = time.process_time()
        run = running.run_study(study, config, Path(folder), model=model)
        whole = time.process_time() - start
        rows = run.df()
    start = time.process_time()
    beside = bare(model, config)
    loop = time.process_time() - start
    pd.testing.assert_frame_equal(rows, beside, check_dtype=False)

    framework = whole - sum(spent.values())
    print(f"{PRESET} with {arguments.items} items of each task, {len(rows)} rows; CPU seconds\n")
    for what, seconds in {"study": whole, **spent, "framework": framework, "bare loop": loop}.items():
        print(f"{what:12}{seconds:9.2f}s{seconds / spent['measuring']:8.3f} of measuring")
    print(f"\nframework: {framework / whole:.2%} of the study (limit {LIMIT:.0%})")
    if arguments.items >= ITEMS:  # with fewer, what every run costs once weighs more
        assert framework < LIMIT * whole


def bare(model: kv.Model, config: robustness.Config) -> pd.DataFrame:
    """The rows of all items, in a loop."""
    items = [(task, item) for task in tasks_of(config) for item in task.items(config.samples, config.seed)]
    tables = [
        pd.DataFrame(
            answer(
                model,
                Sample(task, item, number, prompt(item, model.tokenizer)),
                cases(config),
                config.seed,
                follow=config.follow,
            )
        )
        for number, (task, item) in enumerate(items)
    ]
    return pd.concat(tables, ignore_index=True)


def timed(function: Callable[..., Any], spent: dict[str, float], what: str) -> Callable[..., Any]:
    """The function, whose CPU seconds are added up."""

    def run(*given: Any, **named: Any) -> Any:
        start = time.process_time()
        try:
            return function(*given, **named)
        finally:
            spent[what] += time.process_time() - start

    return run


if __name__ == "__main__":
    main()
