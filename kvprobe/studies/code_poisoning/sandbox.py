"""Answers are run in a process of their own, with limits and nothing to find; what comes back is text."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvprobe.errors import UserError
from kvprobe.studies.code_poisoning import sandboxed

SEED = {"PYTHONHASHSEED": "0"}
"""All of the environment: sets have the same order each time, so that an answer has the same outcome."""
PATIENCE = 10.0
"""Seconds that a process may take by the clock; `sandboxed.SECONDS` of CPU are its limit."""
NO_LIMITS = "Answers in code are run with limits that this system does not have; run this under Linux."
STOPPED = "<stopped>"
"""The outcome of a test that the process did not come to the end of."""


def run_tests(code: str, function: str, tests: Sequence[str]) -> tuple[str, ...]:
    """What a function of untrusted code returns for each test, as text (`sandboxed.shown`), or `<…>` where it fails.

    The code runs in a new process of an interpreter without site packages, in an empty folder.

    Raises:
        UserError: this system cannot limit what a process takes.
    """
    if sys.platform == "win32":
        raise UserError(NO_LIMITS)
    asked = json.dumps({"code": code, "function": function, "tests": list(tests)})
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-s", "-P", "-S", str(Path(sandboxed.__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=SEED,
            start_new_session=True,
        )
        try:
            process.communicate(asked.encode("ascii", "backslashreplace"), timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode == sandboxed.UNLIMITED:
            raise UserError(NO_LIMITS)
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
