"""The command that serves the page."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from kvprobe.cli.flags import USUAL, Chosen, Loading, Whole
from kvprobe.errors import UserError
from kvprobe.models.catalogue import check_source

if TYPE_CHECKING:
    from kvprobe.app.microscope import Microscope
    from kvprobe.app.server import LoadMicroscope
    from kvprobe.app.work import Step

EXAMPLE = "smollm2-135m"
"""The model whose states the page shows before one is loaded."""
SERVERS = ("http://", "https://")


def _known(_: object, source: str) -> None:
    """A server's address, or a model's name, looked at before torch is imported."""
    if not source.startswith(SERVERS):
        check_source(source)


def serve(
    model: Annotated[
        str, Parameter(help="A model, or the address of a llama-server: http://127.0.0.1:8080.", validator=_known)
    ] = EXAMPLE,
    *,
    chat: Annotated[Path | None, Parameter(help="A conversation in JSON or JSONL; an example by default.")] = None,
    conversation: Chosen = None,
    ask: Annotated[str | None, Parameter(help="The user's next message, after --chat.")] = None,
    slots: Annotated[
        Path | None, Parameter(help="Of a llama-server on this machine: the folder that it has as --slot-save-path.")
    ] = None,
    gguf: Annotated[
        Path | None, Parameter(help="Of a llama-server: its model's file, where it names one that is not here.")
    ] = None,
    port: Annotated[Whole, Parameter(help="On this machine; a free one by default.")] = 0,
    open: Annotated[bool, Parameter(help="Open the page in the browser.", negative="--no-open")] = True,
    loading: Loading = USUAL,
) -> None:
    """Open the microscope: a page on which parts of a cache are hidden or damaged."""
    import socket

    from kvprobe.text.chat_file import read_chat

    try:
        import uvicorn

        from kvprobe.app.server import served
    except ModuleNotFoundError as error:
        raise UserError(f"kvprobe app needs {error.name}; install it with pip install 'kvprobe[app]'.") from error
    from kvprobe.app.address import Address

    if chat is None and (ask is not None or conversation is not None):
        raise UserError("--ask and --conversation belong to --chat; give its file, or ask on the page.")
    start = None if chat is None else Address.of_chat(read_chat(chat, conversation), ask or "What did I say first?")

    if (slots or gguf) and not model.startswith(SERVERS):
        raise UserError("--slots and --gguf belong to the address of a llama-server; give it, or leave them out.")
    load = _of_server(model, slots, gguf, loading) if model.startswith(SERVERS) else _of_model(model, loading)
    try:
        listening = socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        raise UserError(f"Port {port} of this machine cannot be used ({error}); give another, or none.") from error
    app, address = served(load, listening.getsockname()[1], start, model == EXAMPLE and loading == USUAL)
    print(f"The microscope on {model}: {address}\nOnly this machine can open it, with this address. Ctrl+C ends it.")
    if open:
        import webbrowser

        webbrowser.open(address)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    server.run(sockets=[listening])


def _of_model(name: str, loading: Loading) -> "LoadMicroscope":
    """What gives the microscope on a model that is loaded here."""

    def load(step: "Step") -> "Microscope":
        from kvprobe.app.microscope import Microscope

        step(f"loading {name}, once")
        return Microscope(loading.model(name), loading.code(name))

    return load


def _of_server(url: str, slots: Path | None, gguf: Path | None, loading: Loading) -> "LoadMicroscope":
    """What gives the microscope on a llama-server.

    Raises:
        UserError: its folder is not given or not there, or how a model is loaded is given.
    """
    if slots is None:
        raise UserError(
            "kvprobe edits a llama-server's slots in files; give --slots, the folder that llama-server has as "
            "--slot-save-path, on this machine."
        )
    if loading != USUAL:
        raise UserError("A llama-server has loaded its model already; leave out how to load it.")
    if not slots.is_dir():
        raise UserError(f"There is no folder {slots}; give the one that llama-server has as --slot-save-path.")

    def load(step: "Step") -> "Microscope":
        from kvprobe.app.microscope import Microscope
        from kvprobe.engines.served_model import ServedModel

        step(f"asking {url}")
        return Microscope(ServedModel.at(url, slots, gguf))

    return load
