"""From answers to findings: what flips do by dtype, bit and field, where they do more, and at which rate accuracy
falls."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvprobe.experiments.estimands import Estimand, Mean, Pooled, Share, Total, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.faults.bit_flips import LAYOUTS
from kvprobe.faults.scope import bands
from kvprobe.inference.model import Model
from kvprobe.report.crossing import until_below
from kvprobe.report.document import chat_record
from kvprobe.report.findings import Findings
from kvprobe.stats import DIFFERENCE, POSITIVE, UNBOUNDED
from kvprobe.studies import answers
from kvprobe.studies.answers import NATS, SOUND
from kvprobe.studies.bitflips import Config
from kvprobe.studies.bitflips.collect import FIELDS, NOWHERE
from kvprobe.tasks.task import Task
from kvprobe.tidy import Rows, Where, beside, chosen

OF_RIGHT = ("nothing", "words", "breaks", "loud")
"""What became of an item whose clean answer is right: the same answer token for token; another wording, still right; no
longer right, or numbers that are not finite. The last of these alone is `loud`."""
OF_ALL = ("same", "different", "nonfinite", "changed")
"""What became of any item: the same answer; another one, all numbers finite; numbers that are not finite. Either of the
latter is `changed`."""
CONTRASTS: dict[tuple[str, str], tuple[Where, Where]] = {
    ("exponent", "mantissa"): ({"field": "exponent"}, {"field": "mantissa"}),
    ("sign", "mantissa"): ({"field": "sign"}, {"field": "mantissa"}),
    ("top", "rest"): ({"field": "exponent", "top": True}, {"field": "exponent", "top": False}),
    ("k", "v"): ({"field": "exponent", "part": "k"}, {"field": "exponent", "part": "v"}),
    ("late", "early"): ({"field": "exponent", "third": "late"}, {"field": "exponent", "third": "early"}),
}
"""Single flips that are compared. Which parts and layers an item's flips strike is drawn, and so is how many."""
FEW = 12
"""Items with a right answer below which intervals over them decide little."""
UNCHANGED = 1e-6
"""Nats of KL that a row in which nothing was flipped may be from the clean one."""

SINGLE: Where = {"group": "single"}
COULD_BREAK: Where = {"was_right": True, "able": True}
LEVEL = ("task", "field", "rate")
RATE: Where = {"group": "rate"}
SUMMARIES: tuple[tuple[str, tuple[str, ...], Mapping[str, str]], ...] = (
    ("bit", ("task", "dtype", "bit"), {}),
    ("field", ("task", "dtype", "field"), {}),
    ("field", ("task", "dtype"), {"field": "all"}),
)
"""What single flips are summarised by: the first word of findings, and their keys."""


def estimands() -> Iterator[Estimand]:
    """Of the clean answers; of single flips by bit and by field; of single flips compared; of flips at a rate."""
    yield Share(name="sound", of="right", by=("task",), where={"case": -1})
    yield Total(name="right_items", of="right", by=("task",), where={"case": -1})
    for level, by, keys in SUMMARIES:
        for became in (*OF_ALL, *OF_RIGHT):
            where = {**SINGLE, **(COULD_BREAK if became in OF_RIGHT else {})}
            yield Share(name=f"{level}_share", of=became, by=by, where=where, keys={**keys, "became": became})
        yield Pooled(name=f"{level}_kl", of="kl", by=by, where=SINGLE, keys=keys, within=POSITIVE, unit=NATS)
        for count in ("flips", "nonfinite"):
            yield Total(name=f"{level}_{count}", of=count, by=by, where=SINGLE, keys=keys)
    for of, among, within in (("breaks", COULD_BREAK, DIFFERENCE), ("changed", {}, DIFFERENCE), ("kl", {}, UNBOUNDED)):
        for (first, second), (where, less) in CONTRASTS.items():
            yield Pooled(
                name=f"contrast_{of}",
                of=of,
                by=("task", "dtype"),
                where={**SINGLE, **among, **where},
                less={**SINGLE, **among, **less},
                keys={"first": first, "second": second},
                within=within,
                unit=NATS if of == "kl" else "",
                together=(),
            )
    yield Share(name="accuracy", of="right", by=LEVEL, where=RATE)
    yield Mean(name="from_clean", of="from_clean", by=LEVEL, where=RATE, within=DIFFERENCE, together=())
    yield Share(name="changed", of="changed", by=LEVEL, where=RATE)
    yield Share(name="nonfinite", of="nonfinite", by=LEVEL, where=RATE)
    yield Mean(name="kl", of="kl", by=LEVEL, where=RATE, within=POSITIVE, unit=NATS)
    yield Mean(name="struck", of="struck", by=LEVEL, where=RATE, unit="vectors")
    for count in ("nonfinite", "untouched"):
        yield Total(name=f"{count}_rows", of=count, by=LEVEL, where=RATE)


def conclude(table: Rows, config: Config, model: Model) -> Conclusion:
    shape = model.geometry
    tasks = answers.tasks_of(config)
    thirds = bands(shape.n_layers, min(3, shape.n_layers))
    rows = prepared(table, tasks, late=thirds[-1], early=thirds[0])
    findings = measure(rows, estimands())
    about = {task.name: answers.task_facts(table, task, findings) for task in tasks}
    for task in tasks:
        # The prompt's last token is read after the strike.
        slots = float(chosen(rows, {**SOUND, "task": task.name})["slots"].mean()) - 1
        numbers = slots * shape.n_layers * shape.n_kv_heads * 2 * shape.d_head
        findings.number("chance", task.chance, task=task.name)
        findings.number("slots", slots, task=task.name)
        findings.number("numbers", numbers, task=task.name)
        for rate in config.error_rates:
            findings.number("expected", numbers * rate, task=task.name, rate=rate)
        if not about[task.name]["too_hard"]:
            add_tolerated(findings, task.name)
    item = tasks[0].items(1, config.seed)[0]
    facts: dict[str, Any] = {
        "tasks": {
            name: fact | harm_facts(chosen(rows, {"task": name}), breakable=breakable(fact, findings, name))
            for name, fact in about.items()
        },
        "chat": chat_record(item.chat, marked=item.answer),
        "lead": item.lead,
        "layers": shape.n_layers,
        "windows": [window for window in shape.windows if window is not None],
        "late": [thirds[-1][0], thirds[-1][-1]],
        "early": [thirds[0][0], thirds[0][-1]],
        "dtype": model.dtype,
    }
    controls = [control for task in tasks for control in controls_of(rows[rows["task"] == task.name], task.name)]
    return Conclusion(findings, controls, facts, list(warnings_of(config, findings, facts)))


def prepared(table: Rows, tasks: Sequence[Task], late: range, early: range) -> Rows:
    """All rows with what became of each, and which of them are compared."""
    right, nonfinite = table["right"].astype(bool), table["broken"] != ""
    same = table["same"].astype(bool) & ~nonfinite
    highest = table["dtype"].map({name: layout.field("exponent")[-1] for name, layout in LAYOUTS.items()})
    rows = table.assign(
        bit=table["bit"].fillna(NOWHERE).astype(int),
        right=right,
        same=same,
        different=~same & ~nonfinite,
        nonfinite=nonfinite,
        changed=~same,
        nothing=same,
        words=~same & right,
        breaks=~right,
        loud=nonfinite,
        flips=1,
        untouched=table["struck"] == 0,
        top=table["bit"] == highest,
        third=np.select([table["layer"].isin(late), table["layer"].isin(early)], ["late", "early"], "between"),
    )
    clean = beside(rows, "right", {"case": -1}, ("task", "sample"))
    return rows.assign(was_right=clean == 1, from_clean=right - clean, able=answers.able(rows, tasks, "right"))


def add_tolerated(findings: Findings, task: str) -> None:
    """The highest measured rate up to which accuracy is at none significantly below clean; unknown if the lowest
    already is, and no finding where there are too few items for intervals."""
    for field in FIELDS:
        losses = sorted(findings.where("from_clean", task=task, field=field), key=lambda loss: loss.keys["rate"])
        if all(loss.value.has_interval for loss in losses):
            findings.number("tolerated", until_below(losses, "rate")[0], task=task, field=field)


def breakable(fact: Mapping[str, Any], findings: Findings, task: str) -> bool:
    """Whether breaks of right answers can be compared; one right answer is no sample of them."""
    return not fact["too_hard"] and findings.at("right_items", task=task).mean > 1


def harm_facts(rows: Rows, *, breakable: bool) -> dict[str, Any]:
    """What became of a task's answers, as tables show it."""
    return {
        "items": rows["sample"].nunique(),
        "became": list(OF_RIGHT[:3] if breakable else OF_ALL[:3]),
        "harm": "breaks" if breakable else "changed",
        "broken": {group: broken(rows[rows["group"] == group]) for group in ("single", "rate")},
        "examples": examples(rows),
    }


def broken(rows: Rows) -> dict[str, Any]:
    """How many rows were not finite, and the first of them."""
    broken_rows = rows[rows["nonfinite"]]
    records = broken_rows[["broken", "item", "dtype", "field"]].astype(str).to_dict("records")
    return {"rows": len(rows), "broken": len(records), "first": records[0] if records else None}


def examples(rows: Rows) -> list[dict[str, Any]]:
    """For each dtype and field the first answer that differs while all numbers are finite, a break of a right answer if
    there is one."""
    clean = rows[rows["case"] == -1].set_index("sample")["text"]
    differ = rows[(rows["group"] == "single") & rows["different"]]
    differ = differ.sort_values(["was_right", "breaks"], ascending=False, kind="stable")
    return [
        {name: str(first[name]) for name in ("dtype", "field", "part", "item", "answer", "text")}
        | {name: int(first[name]) for name in ("bit", "layer", "head")}
        | {"clean": str(clean[first["sample"]]), "right": bool(first["right"])}
        for first in (alike.iloc[0] for _, alike in differ.groupby(["dtype", "field"], sort=False))
    ]


def controls_of(rows: Rows, task: str) -> Iterator[Control]:
    """Whether nothing did nothing on a task, and one flip struck one number."""
    yield answers.nothing_struck(rows[rows["group"] == "control"], UNCHANGED, f" ({task}, flips at a rate of zero)")
    struck = rows[rows["group"] == "single"]["struck"]
    seen = f"a single flip struck {int(struck.min())} to {int(struck.max())} vectors (expected: exactly 1)."
    yield Control(f"{task}: {seen}", bool((struck == 1).all()))


def warnings_of(config: Config, findings: Findings, facts: Mapping[str, Any]) -> Iterator[str]:
    yield from answers.warnings_of(config, facts["tasks"])
    for task, fact in facts["tasks"].items():
        right = int(findings.at("right_items", task=task).mean)
        if fact["too_hard"]:
            yield f"Of {task}, only whether answers stay the same and numbers finite is reported."
        elif right < FEW <= config.samples:
            yield f"Of {task}, only {right} items are answered rightly on a sound cache, and only those can break."
    if facts["dtype"] != "float32":
        yield (
            f"The model runs in {facts['dtype']}, in which K and V are held: bits of a finer dtype that it cannot hold "
            "are rounded away again after the flip."
        )
