"""Commands on studies and their runs, and what there is to run."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from cyclopts import App, Group, Parameter

from kvprobe.cli.flags import StudyFile, whole, whole_numbers
from kvprobe.durations import durations, minutes
from kvprobe.experiments.settings import LAST, Settings, as_mapping, digest_of, folder_of, from_mapping, types_of
from kvprobe.extensions import extensions
from kvprobe.models.catalogue import check_source
from kvprobe.presets import Preset, presets, read_preset
from kvprobe.studies import STUDIES, find, study_of

EVERY_STUDY = Group("Every study", sort_key=2)
PROCESSES = (
    "Parts of the run that are worked on side by side, each in a process with memory of its own that shares the model; "
    "on a CPU under Linux."
)

runs_app = App(
    name="run",
    help="Run a study, a preset, a YAML file of settings, or a .py file of a study; flags change its settings.",
)


def add_run_commands(arguments: list[str]) -> None:
    """One `run` command per study, per preset (which may have the name of its study), and for a YAML file if named."""
    runnable = {name: Preset(name, name, {}, study.question) for name, study in STUDIES.items()}
    runnable |= presets()
    named = arguments[1] if len(arguments) > 1 else ""
    if named.endswith((".yaml", ".yml")):
        runnable[named] = read_preset(Path(named))
    if named.endswith(".py"):
        runnable[named] = Preset(named, named, {}, find(named).question)
    if named not in runnable and named in extensions("studies"):
        runnable[named] = Preset(named, named, {}, find(named).question)
    for name, preset in runnable.items():
        _add_run_command(name, preset)


def plan(study: str, config: Settings, root: Path, name: str | None) -> Iterator[str]:
    """What a run would do, in lines; nothing is loaded or written."""
    folder = folder_of(study, config, root, name)
    states = {"metrics.json": "is finished: its report would be written again", "parts": "would be resumed"}
    state = next((state for file, state in states.items() if (folder / file).exists()), "would be new")
    yield f"{study} would run with these settings:"
    yield from (f"  {setting}: {value}" for setting, value in as_mapping(config).items())
    yield f"The run {folder} {state}."
    took = durations().get(digest_of(study, config))
    if took is None:
        measured = ", ".join(f"{other.preset} {other}" for other in durations().values() if other.study == study)
        yield f"How long it takes was not measured. Of this study: {measured or 'nothing was'}."
        return
    yield f"It took {took} and {took.peak_bytes / 1e9:.1f} GB of memory when it was measured, of which"
    for place, stage in enumerate(took.timing.stages):
        yield f"  {stage.name}: {stage.total:,} × {stage.unit}, {minutes(took.timing.lasted(place))}"


def _add_run_command(command: str, preset: Preset) -> None:
    study = find(preset.study)
    flags = _with_defaults(from_mapping(study.config, preset.settings))

    def run(
        *,
        config: Settings | None = None,
        out: Annotated[Path, Parameter(help="Folder that holds the runs.")] = Path("runs"),
        name: Annotated[str | None, Parameter(help="Name of the run; made from the settings by default.")] = None,
        processes: Annotated[int, Parameter(help=PROCESSES)] = 1,
        dry_run: Annotated[bool, Parameter(help="Say what would run and how long it would take.", negative="")] = False,
    ) -> None:
        chosen = study.config(**as_mapping(config or flags()))
        check_source(chosen.model)
        if dry_run:
            print("\n".join(plan(study.name, chosen, out, name)))
            return
        from kvprobe.experiments.page import answer

        directory = study.run(chosen, out, name, processes=processes)
        print(f"\n{answer(study.declaration, directory)}\n\nReport: {directory.path / 'report.html'}")

    run.__annotations__["config"] = Annotated[flags, Parameter(name="*")]
    run.__doc__ = preset.question or study.question
    if command in runs_app:  # of an earlier command in this process; the file of this name may be another one now
        del runs_app[command]
    runs_app.command(run, name=command)


def _with_defaults(config: Settings) -> type[Settings]:
    """The config's dataclass with its values as the defaults, for the command line to show and fill."""
    kind = type(config)
    fields = [
        (name, Annotated[setting, _parameter(name, setting)], dataclasses.field(default=getattr(config, name)))
        for name, setting in types_of(kind).items()
    ]
    made = dataclasses.make_dataclass(kind.__name__, fields, bases=(kind,), frozen=True, kw_only=True)
    made.__doc__, made.__module__ = kind.__doc__, kind.__module__
    return made


def _parameter(name: str, kind: object) -> Parameter:
    """How a setting is given: one value, or several after one flag."""
    options: dict[str, Any] = {"group": EVERY_STUDY} if name in LAST else {}
    if kind in (int, tuple[int, ...]):
        options["converter"] = whole if kind is int else whole_numbers
    if get_origin(kind) is tuple:
        options |= {
            "consume_multiple": True,
            "negative": "",
            "show_default": lambda values: " ".join(map(str, values)),
        }
    return Parameter(**options)


def list_everything(
    *, json: Annotated[bool, Parameter(help="Print plain data for a program.", negative="")] = False
) -> None:
    """Studies, presets, models and published probes that kvprobe knows."""
    from kvprobe.listing import known, lines

    if json:
        from json import dumps

        print(dumps(known(), indent=2))
    else:
        print("\n".join(lines(known())))


def report(run: Path, *, study: StudyFile = None) -> None:
    """Write a run's report.html again from its files, and say where it is."""
    from kvprobe.experiments.runs import Run

    finished = Run.load(run)  # a mistaken path is answered before the model library is imported
    from kvprobe.experiments.page import write_page

    print(write_page(study_of(finished, study).declaration, finished))


def view(run: Path, *, study: StudyFile = None) -> None:
    """Write the interactive views of a run's report as a page of their own, and say where it is."""
    from kvprobe.experiments.runs import Run

    finished = Run.load(run)  # a mistaken path is answered before the model library is imported
    from kvprobe.experiments.page import write_views

    print(write_views(study_of(finished, study).declaration, finished))


def new(what: Literal["study"], name: str) -> None:
    """Write a commented study of your own to NAME.py, to begin with."""
    from kvprobe.experiments.skeleton import write_skeleton

    print(write_skeleton(name))


def publish(
    run: Path,
    *,
    to: Annotated[Path, Parameter(help="Folder that holds the probes.")] = Path("probes"),
    name: Annotated[str | None, Parameter(help="Only the probe of this name; all by default.")] = None,
) -> None:
    """Publish the probes of a finished run: a folder each, with weights, a card, and the card in words."""
    from kvprobe.experiments.runs import Run
    from kvprobe.probes.publishing import publish as published

    for folder in published(Run.load(run), to, name):
        print(folder)
