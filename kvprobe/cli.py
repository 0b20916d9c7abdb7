"""The command line. Heavy imports happen inside commands, so that `kvprobe --help` answers at once."""

import dataclasses
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from cyclopts import App, CycloptsError, Group, Parameter, Token

from kvprobe.errors import UserError
from kvprobe.experiments.presets import Preset, presets, read_preset
from kvprobe.experiments.settings import LAST, Settings, as_mapping, from_mapping, types_of
from kvprobe.names import one_line
from kvprobe.studies import STUDIES, find, study_of


def _whole(_: Any, tokens: Sequence[Token]) -> int:
    """A flag's whole number; cyclopts would round 3.5."""
    try:
        return int(tokens[0].value)
    except ValueError as error:
        raise UserError(f"{tokens[0].value!r} is not a whole number.") from error


def _whole_numbers(_: Any, tokens: Sequence[Token]) -> tuple[int, ...]:
    try:
        return tuple(int(token.value) for token in tokens)
    except ValueError as error:
        values = " ".join(token.value for token in tokens)
        raise UserError(f"Invalid value for {tokens[0].keyword}: {values!r} are not whole numbers.") from error


Whole = Annotated[int, Parameter(converter=_whole)]
StudyFile = Annotated[Path | None, Parameter(help="The Python file of a study of your own.")]
EVERY_STUDY = Group("Every study", sort_key=2)

app = App(
    name="kvprobe",
    help="A microscope for the KV cache: what survives when context is masked, evicted, compacted or damaged.",
    version_flags=["--version"],
)
runs_app = App(
    name="run",
    help="Run a study, a preset, a YAML file of settings, or a .py file of a study; flags change its settings.",
)
app.command(runs_app)


def main() -> None:
    """Entry point of the command line.

    Exit codes: 2 for what the user can mend, in one sentence; 70 for a defect of kvprobe; 130 for an interruption.
    """
    debug = "--debug" in sys.argv[1:]
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        if arguments[:1] == ["run"]:
            _add_run_commands(arguments)
        app(arguments, exit_on_error=False, print_error=False)
    except BrokenPipeError:
        # The reader has closed the pipe; what is still in the buffer must not be an error either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (UserError, CycloptsError, OSError) as error:
        print(f"kvprobe: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nkvprobe: interrupted; give the same command again to resume.", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if _memory_is_full(error):
            print(f"kvprobe: too little memory ({one_line(error)}); use less text or a smaller batch.", file=sys.stderr)
            sys.exit(2)
        if debug:
            traceback.print_exception(error)
        print(f"kvprobe: {_defect(error)}", file=sys.stderr)
        sys.exit(70)


def _memory_is_full(error: Exception) -> bool:
    """Whether memory ran out; torch's errors are known by name and text, so that torch need not be imported to ask."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )


def _defect(error: Exception) -> str:
    """The sentence for an unexpected error; writes its traceback to a file."""
    file, path = tempfile.mkstemp(prefix="kvprobe-", suffix=".txt")
    with os.fdopen(file, "w", encoding="utf-8") as written:
        traceback.print_exception(error, file=written)
    return (
        f"this is a defect of kvprobe, not of your input ({type(error).__name__}: "
        f"{one_line(error)}); please report it with the traceback, which is in {path} and is "
        "printed with --debug."
    )


@app.command(name="ls")
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


@app.command
def report(run: Path, *, study: StudyFile = None) -> None:
    """Write a run's report.html again from its files, and say where it is."""
    from kvprobe.experiments.runs import Run

    finished = Run.load(run)
    print(study_of(finished, study).write_report(finished))


@app.command
def view(run: Path, *, study: StudyFile = None) -> None:
    """Write the interactive views of a run's report as a page of their own, and say where it is."""
    from kvprobe.experiments.runs import Run

    finished = Run.load(run)
    print(study_of(finished, study).write_views(finished))


@app.command
def new(what: Literal["study"], name: str) -> None:
    """Write a commented study of your own to NAME.py, to begin with."""
    from kvprobe.experiments.skeleton import write_skeleton

    print(write_skeleton(name))


@app.command
def attend(
    model: str = "smollm2-135m",
    *,
    text: Annotated[str | None, Parameter(help="A text, read as it is.")] = None,
    chat: Annotated[Path | None, Parameter(help='Or a JSON file: a list of {"role": …, "content": …}.')] = None,
    mask: Annotated[
        tuple[str, ...],
        Parameter(help="Messages to mask before the last one is read: m0, m1, ….", consume_multiple=True, negative=""),
    ] = (),
    last: Annotated[Whole | None, Parameter(help="Only so many of the last tokens attend; all by default.")] = None,
    out: Annotated[Path, Parameter(help="The page.")] = Path("attention.html"),
    device: str = "auto",
    dtype: str = "auto",
) -> None:
    """Write a page of what a model attends to, head by head; with --mask, before and after messages are masked."""
    from kvprobe.text.chat_file import read_chat

    read = text if chat is None else read_chat(chat)
    if read is None or None not in (text, chat):
        raise UserError("Give --text or --chat, and not both.")
    from kvprobe.inference.model import load
    from kvprobe.report.views.attend import attend_page

    print(attend_page(load(model, device=device, dtype=dtype), read, mask, last).save(out))


@app.command
def publish(
    run: Path,
    *,
    to: Annotated[Path, Parameter(help="Folder that holds the probes.")] = Path("probes"),
    name: Annotated[str | None, Parameter(help="Only the probe of this name; all by default.")] = None,
) -> None:
    """Publish the probes of a finished run: a folder each, with weights, a card, and the card in words."""
    from kvprobe.experiments.publishing import publish as published
    from kvprobe.experiments.runs import Run

    for folder in published(Run.load(run), to, name):
        print(folder)


@app.command
def scan(
    model: str = "smollm2-135m",
    *,
    chat: Annotated[Path, Parameter(help='A JSON file: a list of {"role": …, "content": …}.')],
    mask: Annotated[
        tuple[str, ...], Parameter(help="Messages to hide: m0, m1, ….", consume_multiple=True, negative="")
    ],
    until: Annotated[
        str | None, Parameter(help="The last message that still sees them; the assistant's next answer by default.")
    ] = None,
    probes: Annotated[
        tuple[str, ...],
        Parameter(
            help="Names or folders of probes; all published ones of the model by default.",
            consume_multiple=True,
            negative="",
        ),
    ] = (),
    out: Annotated[Path, Parameter(help="The page.")] = Path("scan.html"),
    device: str = "auto",
    dtype: str = "auto",
) -> None:
    """Show, segment by segment, what published probes can still read of hidden messages; as a table and a page."""
    from kvprobe.text.chat_file import read_chat

    conversation = read_chat(chat)
    from kvprobe.inference.model import load
    from kvprobe.probes.probe import Probe
    from kvprobe.probes.scan import scan
    from kvprobe.report.views.scan import save_scan, scan_lines

    chosen = [Probe.load(name) for name in probes] or None
    readings = scan(load(model, device=device, dtype=dtype), conversation, mask, chosen, until=until)
    print("\n".join(scan_lines(readings)))
    print(f"\nPage: {save_scan(readings, out)}")


@app.command
def budget(
    model: str = "smollm2-135m",
    *,
    context: Annotated[Whole, Parameter(help="Tokens of each conversation.")] = 8192,
    new: Annotated[Whole, Parameter(help="How many of them are generated, one by one.")] = 0,
    batch: Annotated[Whole, Parameter(help="Conversations at once.")] = 1,
    source: Annotated[Whole, Parameter(help="Tokens of the other input that cross-attention looks at.")] = 0,
    dtype: Annotated[str | None, Parameter(help="Of weights and activations; by default the config's.")] = None,
    cache_dtype: Annotated[
        str | None, Parameter(help="Of the cache: a float, fp8, int4, int2 (hf), int8_per_token_head, nvfp4 … (vllm).")
    ] = None,
    engine: Annotated[
        Literal["hf", "vllm", "logical"],
        Parameter(help="Whose caches: transformers', vLLM's, or what a query may read."),
    ] = "hf",
    policy: Annotated[str | None, Parameter(help="As in Python: 'SinkWindow(4, 1020)', 'Quantise(4)'.")] = None,
    memory: Annotated[str | None, Parameter(help="What there is: 24GiB, 80GB.")] = None,
    weights: Annotated[str | None, Parameter(help="What the weights take, if the config does not tell.")] = None,
    kernel: Annotated[
        Literal["sdpa", "eager"] | None,
        Parameter(help="Of attention in transformers; by default what it takes itself."),
    ] = None,
    logits: Annotated[Literal["last", "all"], Parameter(help="Of the prompt's last token, or of all.")] = "last",
    ranks: Annotated[Whole, Parameter(help="GPUs that share the model in vLLM; the budget is that of one.")] = 1,
    block: Annotated[Whole, Parameter(help="Tokens of a vLLM block.")] = 16,
    batched_tokens: Annotated[Whole, Parameter(help="That a vLLM step reads at most.")] = 8192,
    json: Annotated[bool, Parameter(help="Print numbers for a program instead of a table.", negative="")] = False,
    figure: Annotated[Path | None, Parameter(help="Also draw memory over context into this file.")] = None,
    measure: Annotated[
        bool, Parameter(help="Also load the model, generate, and say what was really held.", negative="")
    ] = False,
    device: Annotated[str, Parameter(help="Where to measure.")] = "auto",
) -> None:
    """Say what a model's memory is used for, from its config alone: weights, cache by layer, peak, and what still
    fits."""
    from kvprobe.memory.budget import budget as budgeted

    needs = budgeted(
        model,
        context=context,
        new=new,
        batch=batch,
        source=source,
        dtype=dtype,
        cache_dtype=cache_dtype,
        engine=engine,
        policy=policy,
        memory=memory,
        weights=weights,
        kernel=kernel,
        logits=logits,
        ranks=ranks,
        block=block,
        batched_tokens=batched_tokens,
    )
    measured = None
    if measure:
        if model.endswith(".json") or weights is not None:
            raise UserError("--measure loads the model; give its name or folder instead of a config, and no --weights.")
        from kvprobe.inference.measured import measurable
        from kvprobe.inference.measured import measure as measured_by
        from kvprobe.inference.model import load

        measurable(needs)
        measured = measured_by(load(model, device=device, dtype=needs.request.dtype.name), needs)
    if json:
        from json import dumps

        from kvprobe.memory.table import as_mapping as budget_mapping

        also = {} if measured is None else {"measured": measured.as_mapping()}
        print(dumps({**budget_mapping(needs), **also}, indent=2))
    else:
        print(needs if measured is None else f"{needs}\n\n{measured}")
    if figure is not None:
        import matplotlib

        matplotlib.use("Agg")
        from kvprobe.report.plots import memory as memory_plot
        from kvprobe.report.plots import save

        figure.parent.mkdir(parents=True, exist_ok=True)
        bare = figure.with_suffix("") if figure.suffix in (".png", ".svg") else figure
        save(memory_plot(needs), bare)
        print(f"\nFigure: {bare}.png and .svg", file=sys.stderr)


@app.command
def doctor(model: str = "smollm2-135m", *, device: str = "auto", dtype: str = "auto") -> None:
    """Check that a model's two lanes, its hooks, masking and decoding agree; exits with 1 if one does not."""
    from kvprobe.inference.doctor import examine, limits
    from kvprobe.inference.model import load

    loaded = load(model, device=device, dtype=dtype)
    print(f"{loaded.name} on {loaded.lanes.device}, {str(loaded.lanes.dtype).removeprefix('torch.')}\n")
    print(f"{'check':48}{'found':>10}{'allowed':>10}")
    failed = 0
    for check in examine(loaded):
        failed += not check.passed
        print(f"{check.name:48}{check.found:10.1e}{check.allowed:10.1e}  {'ok' if check.passed else 'FAILED'}")
    for sentence in limits(loaded):
        print(f"\nLimit: {sentence}")
    if failed:
        print(f"\n{failed} of these do not hold; results on this model cannot be trusted.", file=sys.stderr)
        sys.exit(1)


def _add_run_commands(arguments: list[str]) -> None:
    """One `run` command per study, per preset (which may have the name of its study), and for a YAML file if named."""
    runnable = {name: Preset(name, name, {}, study.question) for name, study in STUDIES.items()}
    runnable |= presets()
    named = arguments[1] if len(arguments) > 1 else ""
    if named.endswith((".yaml", ".yml")):
        runnable[named] = read_preset(Path(named))
    if named.endswith(".py"):
        runnable[named] = Preset(named, named, {}, find(named).question)
    for name, preset in runnable.items():
        _add_run_command(name, preset)


def _add_run_command(command: str, preset: Preset) -> None:
    study = find(preset.study)
    flags = _with_defaults(from_mapping(study.config, preset.settings))

    def run(
        *,
        config: Any = None,
        out: Annotated[Path, Parameter(help="Folder that holds the runs.")] = Path("runs"),
        name: Annotated[str | None, Parameter(help="Name of the run; made from the settings by default.")] = None,
    ) -> None:
        chosen = study.config(**as_mapping(config or flags()))
        directory = study.run(chosen, out, name)
        print(f"\n{study.answer(directory)}\n\nReport: {directory.path / 'report.html'}")

    run.__annotations__["config"] = Annotated[flags, Parameter(name="*")]
    run.__doc__ = preset.question or study.question
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


def _parameter(name: str, kind: Any) -> Parameter:
    """How a setting is given: one value, or several after one flag."""
    options: dict[str, Any] = {"group": EVERY_STUDY} if name in LAST else {}
    if kind in (int, tuple[int, ...]):
        options["converter"] = _whole if kind is int else _whole_numbers
    if get_origin(kind) is tuple:
        options |= {
            "consume_multiple": True,
            "negative": "",
            "show_default": lambda values: " ".join(map(str, values)),
        }
    return Parameter(**options)
