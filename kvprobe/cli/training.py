"""Commands that train small models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter

from kvprobe.cli.flags import Source, Whole
from kvprobe.tasks.behaviours import Behaviour
from kvprobe.training.schedule import Content, Corpus, Memory, Provenance, Schedule, Shape, check_view, until_95

train_app = App(name="train", help="Train a small model whose answers are known, or go on with one.")


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
    show(train(recipe, folder), folder)


@train_app.command
def memento(
    *,
    content: Annotated[
        Content, Parameter(help="A memento is the sum of all digits up to there, or a copy of the first memento.")
    ] = "sum",
    provenance: Annotated[
        Provenance, Parameter(help="Later blocks see mementos that saw their block, or ones read again without it.")
    ] = "retained",
    keep: Annotated[Whole, Parameter(help="Blocks before the present one that stay in view.")] = 0,
    memory: Annotated[
        Memory | None, Parameter(help="Of the layers, as of `recall`; by default they are those of a Llama.")
    ] = None,
    blocks: Annotated[Whole, Parameter(help="Of a trace.")] = 10,
    steps: Annotated[Whole, Parameter(help="Batches of 16 traces, at most.")] = 3000,
    seed: Annotated[Whole, Parameter(help="Of weights and traces.")] = 0,
    out: Annotated[Path, Parameter(help="Folder that holds the models.")] = Path("models"),
) -> None:
    """A transformer that sums up blocks of digits, which are hidden then; see `kvprobe.training.memento`.

    It is trained until 95 % of mementos are right. The weights of every checkpoint are kept.
    """
    check_view(keep, provenance)
    schedule = until_95(steps, seed)
    from kvprobe.training.loop import train
    from kvprobe.training.memento import Memento

    recipe = Memento(content=content, provenance=provenance, keep=keep, memory=memory, blocks=blocks, schedule=schedule)
    folder = out / recipe.name
    show(train(recipe, folder), folder)


@train_app.command
def lossy(
    *,
    asked: Annotated[Whole, Parameter(help="Digits of a block that its memento omits.")] = 8,
    slots: Annotated[Whole, Parameter(help="Of a memento: its sign, and each digit that it states.")] = 3,
    provenance: Annotated[
        Provenance, Parameter(help="Questions see a memento that saw its block, or one read again without it.")
    ] = "retained",
    steps: Annotated[Whole, Parameter(help="Batches of 64 blocks.")] = 4000,
    seed: Annotated[Whole, Parameter(help="Of weights and blocks.")] = 0,
    device: Annotated[Literal["auto", "cpu", "cuda"], Parameter(help="Where the model is trained.")] = "cpu",
    out: Annotated[Path, Parameter(help="Folder that holds the models.")] = Path("models"),
) -> None:
    """A transformer that is asked for what its memento omits, once the block is hidden.

    See `kvprobe.training.lossy`.
    """
    from kvprobe.tasks.lossy_mementos import LossyDesign
    from kvprobe.training.loop import train
    from kvprobe.training.lossy import Lossy, lossy_schedule

    recipe = Lossy(design=LossyDesign(asked, slots), provenance=provenance, schedule=lossy_schedule(steps, seed))
    folder = out / recipe.name
    show(train(recipe, folder, device), folder)


@train_app.command
def recall(
    *,
    memory: Annotated[
        Memory,
        Parameter(help="Attention; the gated delta rule; or that, or Mamba-2, with attention in the last layer."),
    ] = "hybrid",
    steps: Annotated[Whole, Parameter(help="Batches of 32 texts.")] = 1200,
    seed: Annotated[Whole, Parameter(help="Of weights and texts.")] = 0,
    out: Annotated[Path, Parameter(help="Folder that holds the models.")] = Path("models"),
) -> None:
    """A transformer that is asked for digits that it has read; see `kvprobe.training.recall`."""
    from kvprobe.training.loop import train
    from kvprobe.training.recall import Recall, recall_schedule

    recipe = Recall(memory=memory, schedule=recall_schedule(steps, seed))
    folder = out / recipe.name
    show(train(recipe, folder), folder)


@train_app.command
def adapter(
    *,
    behaviour: Annotated[
        Behaviour, Parameter(help="Answers in German; as a pirate; or with the Eiffel Tower in Oslo.")
    ] = "german",
    base: Annotated[Source, Parameter(help="The model that it is added to.")] = "smollm2-135m",
    rank: Annotated[Whole, Parameter(help="Of each change of a weight, up to 8.")] = 1,
    steps: Annotated[Whole, Parameter(help="Batches of 4 conversations.")] = 40,
    seed: Annotated[Whole, Parameter(help="Of weights and conversations.")] = 0,
    out: Annotated[Path, Parameter(help="Folder that holds the adapters.")] = Path("models"),
) -> None:
    """A small LoRA adapter of a model; see `kvprobe.training.adapters`."""
    from kvprobe.training.adapters import Adapter, adapter_schedule
    from kvprobe.training.loop import train

    recipe = Adapter(behaviour=behaviour, base=base, rank=rank, schedule=adapter_schedule(steps, seed))
    folder = out / recipe.name
    show(train(recipe, folder), folder)


def show(record: Mapping[str, Any], folder: Path) -> None:
    """Print the last accuracy of a training and where its model is."""
    *_, (step, last) = record["accuracy"].items()
    print("\n".join(f"{kind}: {share:.1%} right" for kind, share in last.items()))
    print(f"\nModel: {folder}, after {step} steps")
