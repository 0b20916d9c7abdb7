"""Commands on studies and their runs, and what there is to run."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from cyclopts import App, Group, Parameter

from kvprobe.cli.flags import Json, StudyFile, Whole, whole, whole_numbers
from kvprobe.durations import durations, minutes
from kvprobe.errors import UserError
from kvprobe.experiments.settings import (
    LAST,
    Settings,
    as_mapping,
    digest_of,
    folder_of,
    folder_with_run,
    from_mapping,
    types_of,
)
from kvprobe.experiments.stages import measured_parts
from kvprobe.extensions import extensions
from kvprobe.files import expanded
from kvprobe.models.catalogue import check_source
from kvprobe.presets import Preset, presets, read_preset
from kvprobe.shipped import shipped
from kvprobe.studies import STUDIES, Entry, find, study_of

EVERY_STUDY = Group("Every study", sort_key=2)
THREADS = "Of each worker of Ray; by default the CPUs of the cluster, shared out."
PROCESSES = "Parts of the run that are worked on side by side: on a CPU under Linux, or by workers of Ray."
ADDRESS = "Of a Ray cluster, `auto` for one that this machine belongs to; by default one is started here."

runs_app = App(
    name="run",
    help="Run a study, a preset, a YAML file of settings, or a .py file of a study.",
    usage="Usage: kvprobe run NAME [OPTIONS]",
    help_epilogue=(
        "`kvprobe ls studies` and `kvprobe ls presets` list the names. `kvprobe run NAME --help` has the settings of "
        "one as flags; `--dry-run` says what would run."
    ),
)


def add_run_commands(arguments: list[str]) -> None:
    """The `run` command that is named: of a preset (which may have the name of its study), a study or a file; or else
    all of them, for near matches and for the shell to complete."""
    named = arguments[1] if len(arguments) > 1 else ""
    files = {path.stem: path for path in shipped("analyses").glob("*.yaml")}
    if named.endswith((".yaml", ".yml")):
        runnable = {named: read_preset(Path(named))}
    elif named in files:
        runnable = {named: read_preset(files[named])}
    elif named.endswith(".py") or named in STUDIES or named in extensions("studies"):
        runnable = {named: Preset(named, named, {}, find(named).question)}
    elif arguments == ["run"] or named.startswith("-"):
        return
    else:
        runnable = {name: Preset(name, name, {}, study.question) for name, study in STUDIES.items()} | presets()
    for name, preset in runnable.items():
        _add_run_command(name, preset)


def plan(study: str, config: Settings, root: Path, name: str | None) -> Iterator[str]:
    """What a run would do, in lines; no model is loaded and nothing written."""
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
        processes: Annotated[Whole, Parameter(help=PROCESSES)] = 1,
        executor: Annotated[Literal["local", "ray"], Parameter(help="What works on them.")] = "local",
        address: Annotated[str | None, Parameter(help=ADDRESS)] = None,
        gpus: Annotated[float, Parameter(help="GPUs that each worker of Ray takes, or a part of one.")] = 0.0,
        threads: Annotated[Whole | None, Parameter(help=THREADS)] = None,
        share: Annotated[str, Parameter(help="Measure one share of the cases alone: 1/2, and 2/2 elsewhere.")] = "1/1",
        dry_run: Annotated[bool, Parameter(help="Say what would run and how long it would take.", negative="")] = False,
    ) -> None:
        chosen = study.config(**as_mapping(config or flags()))
        check_source(chosen.model)
        if executor == "local" and (address is not None or gpus or threads is not None):
            raise UserError("--address, --gpus and --threads are of Ray's workers; add --executor ray.")
        if dry_run:
            _check_files(study, chosen)
            print("\n".join(plan(study.name, chosen, out, name)))
            return
        from kvprobe.experiments.page import answer
        from kvprobe.experiments.parts import ShareMeasured

        try:
            if executor == "ray":
                from kvprobe.executors import Cluster

                cluster = Cluster(address, processes, threads, gpus)
                directory = study.run(chosen, out, name, cluster=cluster, share=_share(share))
            else:
                directory = study.run(chosen, out, name, processes=processes, share=_share(share))
        except ShareMeasured as measured:
            print(measured)
            return
        except KeyboardInterrupt:
            parts = folder_of(study.name, chosen, out, name) / "parts"
            kept = len(measured_parts(parts))
            raise KeyboardInterrupt(f"{kept} measured parts are kept in {parts.parent}") from None
        print(f"\n{answer(study.declaration, directory)}\n\nReport: {directory.path / 'report.html'}")

    run.__annotations__["config"] = Annotated[flags, Parameter(name="*")]
    run.__doc__ = preset.question or study.question
    if command in runs_app:  # of an earlier command in this process; the file of this name may be another one now
        del runs_app[command]
    runs_app.command(run, name=command)


def _share(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal()):
        raise UserError(f"--share is {text!r}; give the number of a share and how many there are, as 1/2.")
    return int(number), int(count)


def _check_files(study: Entry, config: Settings) -> None:
    """Refuse what a run would refuse of the files that its settings name.

    Raises:
        UserError: there is no such file, or it does not hold what the study reads.
    """
    model = expanded(config.model)
    if model.is_dir():
        from kvprobe.models.files import check_folder

        check_folder(model)
    elif model.suffix == ".gguf" and not model.is_file():
        raise UserError(f"There is no GGUF file at {model}; check the path.")
    own = {name: kind for name, kind in types_of(type(config)).items() if name not in ("model", *LAST)}
    if {str, tuple[str, ...]} & set(own.values()):  # others read no files
        study.declaration.inputs(config)


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
    if kind in (int, int | None, tuple[int, ...]):
        options["converter"] = whole_numbers if get_origin(kind) is tuple else whole
    if get_origin(kind) is tuple:
        options |= {
            "consume_multiple": True,
            "negative": "",
            "show_default": lambda values: " ".join(map(str, values)) or "none",
        }
    return Parameter(**options)


def list_names(
    kind: Annotated[str, Parameter(help="As studies, presets, models; see above.")] = "",
    word: Annotated[str, Parameter(help="Only names that have it.")] = "",
    *,
    json: Json = False,
    out: Annotated[Path, Parameter(help="Folder that holds the runs.")] = Path("runs"),
) -> None:
    """List studies, presets, models, probes, policies, faults, zoo, engines, tasks, runs."""
    from kvprobe.listing import KINDS, known, lines, overview

    if not (kind or json):
        print("\n".join(overview()))
        return
    entries = known([kind] if kind else list(KINDS), word, out)
    if json:
        from json import dumps

        print(dumps(entries, indent=2))
    else:
        print("\n".join(lines(kind, entries[kind])))


def report(
    run: Path,
    other: Annotated[Path | None, Parameter(help="A second run of the same study: both side by side.")] = None,
    /,
    *,
    again: Annotated[bool, Parameter(help="Conclude anew from its tables, by this version.", negative="")] = False,
    study: StudyFile = None,
) -> None:
    """Write a run's report.html again, or set two runs side by side."""
    folder_with_run(run)  # a mistaken path is answered before anything heavy is imported
    from kvprobe.experiments.runs import Run

    finished = Run.load(run)
    if again:
        if other is not None:
            raise UserError("--again concludes one run; name one.")
        _ = finished.metrics  # refuses an unfinished run
        of, path = study_of(finished, study), finished.path.resolve()
        config = from_mapping(of.config, finished.config.get("settings") or {})
        of.run(config, path.parent, path.name, again=True)
        print(path / "report.html")
        return
    if other is not None:
        second = Run.load(other)
        from kvprobe.experiments.beside import beside

        both = beside(finished, second)
        print(f"{both}\n\nPage: {both.save(run / f'beside-{second.path.resolve().name}.html')}")
        return
    from kvprobe.experiments.page import write_page

    print(write_page(study_of(finished, study).declaration, finished))


def status(run: Path = Path("runs"), /, *, json: Json = False) -> None:
    """Say how far a run is, or all runs of a folder: cases done, failed ones, time left."""
    from kvprobe.experiments.status import status as status_of
    from kvprobe.experiments.status import statuses
    from kvprobe.listing import digest_of_preset

    named = {digest_of_preset(preset): preset.name for preset in presets().values()}
    one = (expanded(run) / "config.yaml").is_file()
    found = [status_of(run, named)] if one else statuses(run, named)
    if json:
        from json import dumps

        records = [status.record() for status in found]
        print(dumps(records[0] if one else records, indent=2, default=str))
        return
    for line in found[0].lines() if one else (status.line() for status in found):
        print("".join(letter if letter.isprintable() else " " for letter in line))


def merge(
    run: Path,
    other: Path,
    /,
    *,
    out: Annotated[Path | None, Parameter(help="A new folder for both; by default RUN takes what it lacks.")] = None,
) -> None:
    """Join two unfinished runs of one study, each of which measured some of the cases."""
    for path in (run, other):
        folder_with_run(path)
    from kvprobe.experiments.merging import merge as merged

    joined = merged(run, other, out).path
    going_on = f"--out {joined.parent} --name {joined.name}"
    print(f"{joined} has the cases of both; `kvprobe run` with {going_on} goes on with it.")


def view(run: Path, *, study: StudyFile = None) -> None:
    """Write the interactive views of a run's report as a page of their own."""
    folder_with_run(run)  # a mistaken path is answered before anything heavy is imported
    from kvprobe.experiments.runs import Run

    finished = Run.load(run)
    from kvprobe.experiments.page import write_views

    print(write_views(study_of(finished, study).declaration, finished))


def new(what: Literal["study"], name: str) -> None:
    """Write a commented study of your own, as in `new study NAME`."""
    from kvprobe.experiments.skeleton import write_skeleton

    print(write_skeleton(name))


def publish(
    run: Path,
    *,
    to: Annotated[Path, Parameter(help="Folder that holds the probes.")] = Path("probes"),
    name: Annotated[str | None, Parameter(help="Only the probe of this name; all by default.")] = None,
) -> None:
    """Publish the probes of a finished run: weights and a card each."""
    folder_with_run(run)
    from kvprobe.experiments.runs import Run
    from kvprobe.probes.publishing import publish as published

    for folder in published(Run.load(run), to, name):
        print(folder)
