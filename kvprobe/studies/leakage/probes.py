"""The probes that a run keeps, for `kvprobe publish`."""

from kvprobe.experiments.publishing import PROBES
from kvprobe.experiments.runs import Run
from kvprobe.inference.model import Model
from kvprobe.probes.candidate import candidate_probe
from kvprobe.probes.card import Arm, Training
from kvprobe.studies.leakage.analyse import CHANGED, FLOORS, Analysis, Collected
from kvprobe.studies.leakage.config import Config
from kvprobe.wording import estimate_of

READ_FROM: dict[str, tuple[str, Arm, str]] = {
    "masked": ("T3", "retained", "the {secret} that a turn stated before it was masked"),
    "direct": ("summary2", "direct", "the {secret} that a turn stated, from the summary that is read after it"),
    "hidden": ("T2", "hidden", "the {secret} that a turn states, from that turn itself"),
}
"""By arm: the segment, what the model sees there, and what is read."""


def keep_probes(model: Model, collected: Collected, analysis: Analysis, config: Config, run: Run) -> None:
    """Train a probe for each arm on all samples, and write it with its card into the run."""
    use = estimate_of(analysis.metrics["use"]["delta_margin"])
    for arm, (segment, seen, what) in READ_FROM.items():
        restart = collected.features(FLOORS[arm]) if arm in FLOORS else None
        for changed in (False, True) if arm in CHANGED else (False,):
            probe = candidate_probe(
                model,
                collected.features(arm),
                analysis.probings[CHANGED[arm] if changed else arm],
                Training("leakage", what.format(secret=config.secret), segment, seen),
                restart=restart,
                less_restart=changed,
                use=use if arm == "masked" else None,
                folds=config.folds,
                seed=config.seed,
            )
            probe.save(run.path / PROBES / probe.name)
