"""Draw the gallery from the runs of presets (each of which is run first if it has not been).

make figures
"""

from dataclasses import replace
from pathlib import Path

import matplotlib

from kvprobe.experiments.runs import Run
from kvprobe.experiments.settings import from_mapping
from kvprobe.experiments.study import Conclusion
from kvprobe.memory.budget import budget
from kvprobe.presets import presets
from kvprobe.report.plots import memory, save
from kvprobe.studies import find
from kvprobe.studies.leakage.study import STUDY, by_layer

GALLERY = Path(__file__).resolve().parent
RUNS = GALLERY.parent / "runs"
FIGURES = {
    "leakage_by_segment": ("leakage", "layer_by_segment"),
    "use": ("use", "read_and_used"),
    "multihop": ("multihop", "by_distance"),
    "multihop_transfer": ("multihop", "transfer"),
    "features": ("features", "differences"),
    "features_sparse": ("features", "curves_paired"),
    "memory_times": ("memory", "times"),
    "memory_growth": ("memory-gemma3", "growth"),
    "mask_or_restart": ("compaction", "arms"),
    "dangling_attention": ("compaction", "dangling"),
    "rebuilt_cache": ("idle_rebuild", "drift_by_layer"),
    "policies": ("policies", "quality_by_memory"),
    "policies-gemma": ("policies-gemma", "quality_by_memory"),
    "noise_by_layer": ("bands-smollm2", "kl_by_layer"),
    "noise_by_band": ("bands-smollm2", "accuracy_by_band"),
    "robustness": ("robustness-smollm2", "accuracy_by_rate"),
    "gsm8k": ("gsm8k-qwen2.5-coder-1.5b", "accuracy_by_rate"),
    "bitflips": ("bitflips-smollm2", "shares_by_bit"),
    "patching": ("patching", "layer_by_segment"),
    "patching_by_head": ("patching", "layer_by_head"),
    "carriers": ("carriers", "shares"),
    "filter_poison": ("filter_poison", "strips"),
    "filter_poison_tested": ("filter_poison", "tested"),
    "dangling": ("dangling", "went"),
    "dangling_rescued": ("dangling", "rescues"),
    "payload_or_pointer": ("dangling", "memos"),
    "routing_start": ("routing", "start_by_place"),
    "poisoning": ("poisoning", "right_by_arm"),
    "poisoning_layers": ("poisoning", "undone_by_layer"),
    "reliance": ("reliance", "answers_by_source"),
    "reliance_layers": ("reliance", "undone_by_band"),
    "memento": ("memento_toy-seeds", "by_distance"),
    "memento_layers": ("memento_toy-seeds", "by_layer"),
    "memento_training": ("memento_toy-seeds", "by_training"),
}
"""By file: the preset, and the figure of its run."""
FAMILIES = {"leakage": ("leakage", "v"), "leakage_topic": ("leakage-topic", "resid_post")}
"""By file: the preset of a leakage run, and the family that is drawn of its accuracy by layer."""


def main() -> None:
    matplotlib.use("Agg")
    save(memory(budget("google/gemma-3-27b-it", memory="80GB")), GALLERY / "memory")
    for name, (preset, family) in FAMILIES.items():
        run = run_of(preset)
        lines = replace(by_layer(name, "mean", ""), where={"read": "mean", "family": family})
        drawn = lines.draw(Conclusion.of(run.metrics).findings, STUDY.label, str(run.config["settings"]["model"]))
        assert drawn is not None
        save(drawn, GALLERY / name)
    for name, (preset, figure) in FIGURES.items():
        run = run_of(preset)
        for suffix in (".png", ".svg"):
            (GALLERY / f"{name}{suffix}").write_bytes((run.path / "figures" / f"{figure}{suffix}").read_bytes())


def run_of(preset: str) -> Run:
    """The run of a preset."""
    chosen = presets()[preset]
    study = find(chosen.study)
    return study.run(from_mapping(study.config, chosen.settings), RUNS)


if __name__ == "__main__":
    main()
