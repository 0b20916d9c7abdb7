"""The command line's entry point, and what it makes of errors."""

import os
import shlex
import sys
import tempfile
import traceback
import warnings
from typing import Any

from cyclopts import App, CycloptsError

from kvprobe.cli.app import serve
from kvprobe.cli.caches import audit, canary, diff, engines
from kvprobe.cli.instruments import attend, budget, certify, compare, doctor, prefix, scan
from kvprobe.cli.runs import add_run_commands, list_names, merge, new, publish, report, runs_app, status, view
from kvprobe.cli.training import train_app
from kvprobe.errors import KvprobeWarning, UserError
from kvprobe.files import refusal
from kvprobe.names import one_line

app = App(
    name="kvprobe",
    usage="",
    help="A microscope for the KV cache: what survives when context is masked, evicted, compacted or damaged.",
    version_flags=["--version"],
    suppress_keyboard_interrupt=False,  # cyclopts would end without a word
)
for flag in ("--version", "--help"):  # everyone knows them, and the list of commands is to fit a screen
    app[flag].show = False
app.command(runs_app)
app.command(train_app)
app.command(list_names, name="ls")
for command in (
    audit,
    diff,
    canary,
    compare,
    prefix,
    attend,
    scan,
    certify,
    budget,
    doctor,
    report,
    status,
    merge,
    view,
    publish,
    new,
):
    app.command(command)
app.command(serve, name="app")
app.command(engines, show=False)  # a demonstration, which the guide names
app.register_install_completion_command(help="Let a shell complete commands, presets and flags.", show=False)


def main() -> None:
    """Entry point of the command line.

    Exit codes: 2 for what the user can mend, in one sentence; 70 for a defect of kvprobe; 130 for an interruption.
    """
    warnings.showwarning = _shown_with(warnings.showwarning)
    debug = "--debug" in sys.argv[1:]
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        if arguments[:1] in (["run"], ["--install-completion"]):
            add_run_commands(arguments)
        app(arguments, exit_on_error=False, print_error=False)
    except BrokenPipeError:
        # The reader has closed the pipe; what is still in the buffer must not be an error either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (UserError, CycloptsError, OSError) as error:
        print(f"kvprobe: {refusal(error, 'a file') or error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as error:
        command = shlex.join(["kvprobe", *sys.argv[1:]])
        said = f"{error}, and `{command}` resumes" if error.args else f"nothing is kept, and `{command}` begins anew"
        print(f"\nkvprobe: interrupted; {said}.", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if _memory_is_full(error):
            print(f"kvprobe: too little memory ({one_line(error)}); use less text or a smaller batch.", file=sys.stderr)
            sys.exit(2)
        if debug:
            traceback.print_exception(error)
        print(f"kvprobe: {_defect(error)}", file=sys.stderr)
        sys.exit(70)


def _shown_with(others: Any) -> Any:
    """How warnings are shown: those of kvprobe in a sentence, without the line of code that gave them."""

    def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
        if category is not KvprobeWarning:
            others(message, category, *place)
            return
        from tqdm import tqdm

        tqdm.write(f"kvprobe: {message}", file=sys.stderr)  # above the bars

    return show


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
