"""The command line in processes of its own: each is forked from one that has imported `kvprobe.cli` and run nothing, so
that what every command imports is imported once."""

import atexit
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

FORKING = """
import json, os, sys
import kvprobe.cli
for request in sys.stdin:
    code, streams, folder, environment = json.loads(request)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
for number, file in enumerate([os.devnull, *streams]):
    os.dup2(os.open(file, os.O_RDWR), number)
os.chdir(folder)
os.environ.clear()
os.environ.update(environment)
exec(code, {"__name__": "__main__"})
"""


def kvprobe(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command as it is typed."""
    return python(f"import sys\nfrom kvprobe.cli import main\nsys.argv = ['kvprobe', *{arguments!r}]\nmain()")


def python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Code in this folder and environment, with these variables beside it."""
    forking = _forking()
    assert forking.stdin is not None
    assert forking.stdout is not None
    with TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("out", "err")]
        for stream in streams:
            stream.touch()
        request = (code, [*map(str, streams)], os.getcwd(), {**os.environ, **variables})
        forking.stdin.write(json.dumps(request) + "\n")
        forking.stdin.flush()
        returned = int(forking.stdout.readline())
        return subprocess.CompletedProcess(code, returned, *(stream.read_text() for stream in streams))


@cache
def _forking() -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", FORKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(process.communicate)  # it ends with its input
    return process
