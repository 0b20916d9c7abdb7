"""Draw the gallery from the default leakage run (which is run first if it has not been).

make figures
"""

from pathlib import Path

import matplotlib

from kvprobe.plots import save
from kvprobe.studies.leakage.config import Config
from kvprobe.studies.leakage.figures import accuracy_by_layer, heatmap
from kvprobe.studies.leakage.study import run

GALLERY = Path(__file__).resolve().parent


def main() -> None:
    matplotlib.use("Agg")
    finished = run(Config(), GALLERY.parent / "runs")
    probes, metrics = finished.df("probes"), finished.metrics
    probes = probes[probes["read"] == "mean"]
    save(accuracy_by_layer(probes, metrics["chance"], ["v"]), GALLERY / "leakage")
    save(heatmap(probes, metrics), GALLERY / "leakage_by_segment")


if __name__ == "__main__":
    main()
