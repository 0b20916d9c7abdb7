"""A server with a tiny model, as a browser finds it."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from kvprobe.app.address import Address, SaidMessage
from kvprobe.app.microscope import Microscope
from kvprobe.app.server import served
from kvprobe.engines.served_model import ServedModel
from kvprobe.inference.model import Model

HOSTILE = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"
MESSAGES = (
    SaidMessage("user", "the mill has 4."),
    SaidMessage("assistant", "so it is \"' é 水 \u202e"),
    SaidMessage("user", HOSTILE),
)
START = Address(MESSAGES, "and the inn", new=4)


@contextmanager
def serving(
    model: Model | ServedModel, start: Address | None = START, of_example: bool = True
) -> Iterator[tuple[str, list[str]]]:
    """The address of a server, and what it said while it loaded its model."""
    loaded: list[str] = []

    def load(step: object) -> Microscope:
        loaded.append(model.name)
        return Microscope(model)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        app, address = served(load, listening.getsockname()[1], start, of_example)
        settings = uvicorn.Config(app, log_level="critical", access_log=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=lambda: server.run(sockets=[listening]))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield address, loaded
        finally:
            server.should_exit = True
            thread.join()
