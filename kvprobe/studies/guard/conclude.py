"""From answers to findings: what a guard costs on sound caches, what it finds, and what it saves on damaged ones."""

from typing import Any

from kvprobe.experiments.estimands import Difference, Estimand, Mean, Share, measure
from kvprobe.experiments.study import Conclusion, Control
from kvprobe.inference.model import Model
from kvprobe.stats import DIFFERENCE, POSITIVE, SHARE
from kvprobe.studies.answers import NATS
from kvprobe.studies.guard import Config
from kvprobe.studies.guard.collect import DAMAGED, GUARDS, KNOWN, SOUND, TASK, TENFOLD
from kvprobe.tasks.catalogue import find_task
from kvprobe.tasks.task import too_hard
from kvprobe.tidy import Rows, chosen
from kvprobe.wording import few_clusters

CASE = ("fault", "rate")


def gains(of: str, arm: str, **more: Any) -> Estimand:
    """What a guard, or knowing the struck slots, gains on the damaged cache that nothing guards."""
    return Difference(
        name="saved" if of == "right" else "nearer", of=of, by=CASE, keys={"arm": arm}, where={"arm": arm},
        less={"arm": DAMAGED}, together=(), **more,
    )  # fmt: skip


ALARMS: tuple[Estimand, ...] = (Mean(name="alarms", of="alarms", by=("text", "arm"), within=SHARE),)
OF_SOUND: tuple[Estimand, ...] = (
    Share(name="sound", of="right", where={"arm": DAMAGED}),
    *(
        estimand
        for arm in GUARDS
        for estimand in (
            Share(name="guarded", of="right", keys={"arm": arm}, where={"arm": arm}),
            Mean(name="kl_guarded", of="kl", keys={"arm": arm}, where={"arm": arm}, within=POSITIVE, unit=NATS),
            Difference(
                name="cost", of="right", keys={"arm": arm}, where={"arm": DAMAGED}, less={"arm": arm},
                within=DIFFERENCE, together=(),
            ),
        )
    ),
)  # fmt: skip
OF_DAMAGED: tuple[Estimand, ...] = (
    Share(name="accuracy", of="right", by=(*CASE, "arm")),
    Mean(name="kl", of="kl", by=(*CASE, "arm"), within=POSITIVE, unit=NATS),
    Mean(name="broken", of="broken", by=(*CASE, "arm"), within=SHARE),
    Mean(name="found", of="found", by=(*CASE, "arm"), where={"arm": GUARDS}, within=SHARE),
    *(gains("right", arm, within=DIFFERENCE) for arm in (*GUARDS, KNOWN)),
    *(gains("kl", arm, unit=NATS) for arm in (*GUARDS, KNOWN)),
)


def conclude(table: Rows, config: Config, model: Model) -> Conclusion:
    return concluded(table, config)


def concluded(table: Rows, config: Config) -> Conclusion:
    """What `conclude` gives, without the model."""
    task = find_task(config.task)
    sound = table[table["fault"] == SOUND]
    damaged = table[~table["fault"].isin([SOUND, TENFOLD])]
    findings = measure(
        sound[sound["arm"].isin(GUARDS)], ALARMS, (sound[sound["text"] == TASK], OF_SOUND), (damaged, OF_DAMAGED)
    )
    findings.number("chance", task.chance)
    tenfold = chosen(table, {"fault": TENFOLD, "arm": GUARDS})["found"].dropna()
    control = Control(
        f"Of slots read at ten times their scale, guards found {float(tenfold.mean()):.0%} on average and "
        f"{float(tenfold.min()):.0%} at least.",
        bool(len(tenfold)) and float(tenfold.min()) == 1,
    )
    hard = too_hard(task.name, findings.at("sound").mean, task.chance)
    warnings = [*few_clusters(config.samples, "items"), *([hard] if hard else [])]
    return Conclusion(findings, [control], {"too_hard": hard}, warnings)
