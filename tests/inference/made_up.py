"""Tables of answers for which nothing was asked."""

from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from kvprobe.inference.trials import Case


def made_up_answers(
    task: str,
    samples: int,
    cases: Callable[[int], Iterable[Case]],
    right: Callable[[int], bool],
    became: Callable[[dict[str, Any], int], dict[str, Any]],
) -> pd.DataFrame:
    """A table as `kvprobe.inference.trials.answer` gives it.

    Args:
        cases: of an item, by its number.
        right: whether an item is answered rightly with a sound cache.
        became: what is otherwise in a case, by its labels and the item's number.
    """
    sound = {"broken": "", "kl": 0.0, "same": True, "diverged": -1, "struck": 1, "text": " 531."}
    rows: list[dict[str, Any]] = []
    for item in range(samples):
        known = {"task": task, "sample": item, "item": f"item-{item}", "slots": 101, "answer": "531"}
        row = known | sound | {"right": right(item)}
        rows.append(row | {"case": -1, "struck": 0})
        for number, labels in enumerate(dict(case.labels) for case in cases(item)):
            rows.append(row | labels | {"case": number} | became(labels, item))
    return pd.DataFrame(rows)
