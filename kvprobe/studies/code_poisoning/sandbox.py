"""Answers are run in a process of their own, with limits and nothing to find; what comes back is text."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvprobe.errors import UserError
from kvprobe.studies.code_poisoning import sandboxed

PATIENCE = 10.0
"""Seconds that a process may take by the clock; `sandboxed.SECONDS` of CPU are its limit."""
STOPPED = "<stopped>"
"""The outcome of a test that the process did not come to the end of."""


def run_tests(code: str, function: str, tests: Sequence[str]) -> tuple[str, ...]:
    """What a function of untrusted code returns for each test, as text (`sandboxed.shown`), or `<…>` where it fails.

    The code runs in a new process of an isolated interpreter, with no environment, in an empty folder.

    Raises:
        UserError: this system cannot limit what a process takes.
    """
    if sys.platform == "win32":
        raise UserError(
            "Answers in code are run with limits that Windows does not have; run this under Linux or macOS."
        )
    asked = json.dumps({"code": code, "function": function, "tests": list(tests)})
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(sandboxed.__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            process.communicate(asked.encode("ascii", "backslashreplace"), timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        output.seek(0)
        lines = output.read(sandboxed.OUTPUT).decode("ascii", "replace").splitlines()
    return tuple([*map(_outcome, lines), *[STOPPED] * len(tests)][: len(tests)])


def _outcome(line: str) -> str:
    """The text of a line; the last one may be cut off."""
    try:
        text = json.loads(line)
    except ValueError:
        return STOPPED
    return text if isinstance(text, str) else STOPPED
