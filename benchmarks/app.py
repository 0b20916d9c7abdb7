"""A click on the page of `kvprobe app` against the same call from Python.

    python benchmarks/app.py [--repeats 20] [--model smollm2-135m]
    PYTHONPATH=. python benchmarks/app.py --contact [--cold]

The example's conversation, and a new edit each time. A click is the request and its events up to the state, over HTTP
on this machine. Both sides have read the conversation and answered it with everything in view, as a page has once it is
open; their states are asserted to be equal. A click shall take at most 3 s, and at most 1.1 times the call.

`--contact` is the first contact: from the start of `kvprobe app` in a new process to the page in a headless Chromium,
and to a reply that changed because a message was evicted by a click, for which the model is loaded. It shall take less
than two minutes; with `--cold` the model is fetched from the package index, too.
"""

import http.client
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from timing import Row, compared, main

import kvprobe as kv
from kvprobe.app.address import address_of
from kvprobe.app.microscope import Microscope
from kvprobe.app.page import example
from kvprobe.app.server import served
from kvprobe.inference.model import Model


def measure(asked: Namespace) -> Iterator[Row]:
    if asked.contact:
        contact(asked.model, asked.cold)
        return
    model = kv.load(asked.model)
    address, start = serve(model), example()["start"]
    here = Microscope(model)
    slots = len(here.state(address_of(start)).slots["text"])
    edits = [
        [{"kind": kind, "slots": [first, first + 3]}] for kind in ("mask", "evict") for first in range(24, slots - 3)
    ]
    to_click, to_call = itertools.cycle(edits), itertools.cycle(edits)
    clicked, called, seconds = list[Any](), list[Any](), list[float]()
    click(address, start)

    def clicking() -> None:
        began = time.perf_counter()
        clicked.append(click(address, {**start, "edits": next(to_click)}))
        seconds.append(time.perf_counter() - began)

    def calling() -> None:
        called.append(here.state(address_of({**start, "edits": next(to_call)})).to_plain())

    row = compared(f"a click, {slots} slots", "the same call", clicking, calling, asked.repeats, most=1.1)
    for one, other in zip(clicked, called, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}
    passed = f"of the wall: {statistics.median(seconds[1:]):.2f} s, longest {max(seconds[1:]):.2f}, limit 3"
    yield replace(row, note=passed)


def contact(model: str, cold: bool) -> None:
    """Print how long a first visit takes."""
    from tests.devtools import browsing

    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | ({"KVPROBE_CACHE": folder} if cold else {})
        began = time.perf_counter()
        command = [sys.executable, "-m", "kvprobe", "app", model, "--no-open"]
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process,
            browsing(Path(folder) / "profile") as browser,
        ):
            try:
                said = process.stdout.readline() if process.stdout else ""
                tab = browser.tab(said.split()[-1])
                tab.until("document.querySelector('.slot')")
                print(f"{'':50}{'passed':>10}{'computed':>10}  limit")
                print(f"{'the page':50}{time.perf_counter() - began:9.1f}s{computed(process.pid):9.1f}s")
                status = "document.querySelector('#status').textContent"
                tab.do("document.querySelector('.turn-name:not([disabled])').click()")
                tab.do("document.querySelector('[data-edit=evict]').click()")
                while not str(tab.do(status)).startswith("evict m0. The model says"):
                    time.sleep(0.05)
                passed = time.perf_counter() - began
                print(f"{'a changed reply':50}{passed:9.1f}s{computed(process.pid):9.1f}s  120 s  {tab.do(status)}")
            finally:
                process.terminate()


def computed(process: int) -> float:
    """Seconds that a process has computed."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(model: Model) -> str:
    """The address of a page on this model, served until the process ends."""
    listening = socket.create_server(("127.0.0.1", 0))
    app, address = served(lambda step: Microscope(model), listening.getsockname()[1])
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return address


def click(address: str, wanted: object) -> Any:
    """The state that the page gets."""
    parts = urlsplit(address)

    def answer(path: str, content: object = None) -> str:
        connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=600)
        body = None if content is None else json.dumps(content)
        method, headers = ("GET", {}) if body is None else ("POST", {"Content-Type": "application/json"})
        connection.request(method, parts.path + path, body, headers)
        said = connection.getresponse().read().decode()
        connection.close()
        return said

    job = json.loads(answer("jobs", {"address": wanted}))["job"]
    last = answer(f"jobs/{job}").rstrip().rpartition("\n\n")[2]
    return json.loads(last.partition("data: ")[2])


def flags(parser: ArgumentParser) -> None:
    for switch in ("--contact", "--cold"):
        parser.add_argument(switch, action="store_true")


if __name__ == "__main__":
    main(measure, __doc__, repeats=20, flags=flags)
