"""Commands that train small models."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from kvprobe.cli.flags import Whole
from kvprobe.training.schedule import Corpus, Schedule, Shape

train_app = App(
    name="train", help="Train a small model whose answers are known; the same command goes on after an interruption."
)


@train_app.command
def steps(
    *,
    shape: Annotated[
        Shape,
        Parameter(help="A mixture of experts; or a dense model of as many active parameters, or of as many in all."),
    ] = "moe",
    corpus: Annotated[Corpus, Parameter(help="Texts without errors, or with some that are taken back.")] = "plain",
    steps: Annotated[Whole, Parameter(help="Batches of 64 conversations.")] = 6000,
    seed: Annotated[Whole, Parameter(help="Of weights and conversations.")] = 0,
    out: Annotated[Path, Parameter(help="Folder that holds the models.")] = Path("models"),
) -> None:
    """A transformer that works sums step by step; see `kvprobe.training.steps`."""
    schedule = Schedule(steps=steps, batch=64, seed=seed)
    from kvprobe.training.loop import train
    from kvprobe.training.steps import Steps

    recipe = Steps(shape=shape, corpus=corpus, schedule=schedule)
    folder = out / recipe.name
    _, last = train(recipe, folder)["accuracy"].popitem()
    print("\n".join(f"{kind}: {share:.1%} right" for kind, share in last.items()))
    print(f"\nModel: {folder}")
