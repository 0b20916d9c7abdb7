"""Draw the gallery from the default runs (each of which is run first if it has not been).

make figures
"""

from dataclasses import replace
from pathlib import Path

import matplotlib

import kvprobe.studies.carriers.study as carriers
import kvprobe.studies.compaction.study as compaction
import kvprobe.studies.features.study as features
import kvprobe.studies.filter_poison.study as filter_poison
import kvprobe.studies.idle_rebuild.study as idle_rebuild
import kvprobe.studies.multihop.study as multihop
import kvprobe.studies.patching.study as patching
import kvprobe.studies.use.study as use
from kvprobe.experiments.runs import Run
from kvprobe.experiments.study import Conclusion
from kvprobe.memory.budget import budget
from kvprobe.report.plots import memory, save
from kvprobe.studies import bands, bitflips, leakage, policies, robustness
from kvprobe.studies import dangling as dangling_study
from kvprobe.studies import memory as memory_study
from kvprobe.studies.bands.config import Config as BandsConfig
from kvprobe.studies.bitflips.config import Config as BitflipsConfig
from kvprobe.studies.carriers.config import Config as CarriersConfig
from kvprobe.studies.compaction.config import Config as CompactionConfig
from kvprobe.studies.compaction.figures import by_arm, dangling
from kvprobe.studies.dangling.config import Config as DanglingConfig
from kvprobe.studies.features.config import Config as FeaturesConfig
from kvprobe.studies.filter_poison.config import Config as FilterPoisonConfig
from kvprobe.studies.idle_rebuild.config import Config as IdleConfig
from kvprobe.studies.leakage.config import Config as LeakageConfig
from kvprobe.studies.leakage.study import STUDY as LEAKAGE
from kvprobe.studies.leakage.study import by_layer
from kvprobe.studies.memory.config import Config as MemoryConfig
from kvprobe.studies.multihop.config import Config as MultihopConfig
from kvprobe.studies.patching.config import Config as PatchingConfig
from kvprobe.studies.policies.config import Config as PoliciesConfig
from kvprobe.studies.robustness.config import Config as RobustnessConfig
from kvprobe.studies.use.config import Config as UseConfig

GALLERY = Path(__file__).resolve().parent
RUNS = GALLERY.parent / "runs"


def main() -> None:
    matplotlib.use("Agg")
    for config, family, name in (
        (LeakageConfig(), "v", "leakage"),
        (LeakageConfig(secret="topic"), "resid_post", "leakage_topic"),
    ):
        finished = leakage.run(config, RUNS)
        lines = replace(by_layer(name, "mean", ""), where={"read": "mean", "family": family})
        drawn = lines.draw(Conclusion.of(finished.metrics).findings, LEAKAGE.label, config.model)
        assert drawn is not None
        save(drawn, GALLERY / name)
    copy(leakage.run(LeakageConfig(), RUNS), "layer_by_segment", "leakage_by_segment")
    copy(use.run(UseConfig(), RUNS), "read_and_used", "use")
    finished = multihop.run(MultihopConfig(), RUNS)
    copy(finished, "by_distance", "multihop")
    copy(finished, "transfer", "multihop_transfer")
    finished = features.run(FeaturesConfig(), RUNS)
    copy(finished, "differences", "features")
    copy(finished, "curves_resid_post_7", "features_sparse")

    save(memory(budget("google/gemma-3-27b-it", memory="80GB")), GALLERY / "memory")
    copy(memory_study.run(MemoryConfig(), RUNS), "times", "memory_times")
    copy(memory_study.run(MemoryConfig(model="gemma3-270m", memory="2GiB"), RUNS), "growth", "memory_growth")

    finished = compaction.run(CompactionConfig(), RUNS)
    save(by_arm(finished.metrics), GALLERY / "mask_or_restart")
    save(dangling(finished.metrics["dangling"]), GALLERY / "dangling_attention")

    copy(idle_rebuild.run(IdleConfig(), RUNS), "drift_by_layer", "rebuilt_cache")
    copy(policies.run(PoliciesConfig(), RUNS), "quality_by_memory", "policies")
    few = PoliciesConfig(model="gemma3-270m", samples=4, length=420, budgets=(10, 20, 50, 100))
    copy(policies.run(few, RUNS), "quality_by_memory", "policies-gemma")

    finished = bands.run(BandsConfig(), RUNS)
    copy(finished, "kl_by_layer", "noise_by_layer")
    copy(finished, "accuracy_by_band", "noise_by_band")
    copy(robustness.run(RobustnessConfig(), RUNS), "accuracy_by_rate", "robustness")
    copy(bitflips.run(BitflipsConfig(samples=36), RUNS), "shares_by_bit", "bitflips")

    finished = patching.run(PatchingConfig(), RUNS)
    copy(finished, "layer_by_segment", "patching")
    copy(finished, "layer_by_head", "patching_by_head")
    copy(carriers.run(CarriersConfig(), RUNS), "shares", "carriers")

    finished = filter_poison.run(FilterPoisonConfig(), RUNS)
    copy(finished, "strips", "filter_poison")
    copy(finished, "tested", "filter_poison_tested")
    finished = dangling_study.run(DanglingConfig(), RUNS)
    copy(finished, "went", "dangling")
    copy(finished, "rescues", "dangling_rescued")
    copy(finished, "memos", "payload_or_pointer")


def copy(run: Run, figure: str, name: str) -> None:
    """Take a figure into the gallery as the run has drawn it."""
    for suffix in (".png", ".svg"):
        (GALLERY / f"{name}{suffix}").write_bytes((run.path / "figures" / f"{figure}{suffix}").read_bytes())


if __name__ == "__main__":
    main()
