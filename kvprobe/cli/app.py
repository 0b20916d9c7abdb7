"""The command that serves the page."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvprobe.cli.flags import USUAL, Chosen, Loading, Source, Whole
from kvprobe.errors import UserError

EXAMPLE = "smollm2-135m"
"""The model whose states the page shows before one is loaded."""


def serve(
    model: Source = EXAMPLE,
    *,
    chat: Annotated[Path | None, Parameter(help="A conversation in JSON or JSONL; an example by default.")] = None,
    conversation: Chosen = None,
    ask: Annotated[str | None, Parameter(help="The user's next message, after --chat.")] = None,
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
    from kvprobe.app.microscope import Microscope
    from kvprobe.app.work import Step

    if chat is None and (ask is not None or conversation is not None):
        raise UserError("--ask and --conversation belong to --chat; give its file, or ask on the page.")
    start = None if chat is None else Address.of_chat(read_chat(chat, conversation), ask or "What did I say first?")

    def load(step: Step) -> Microscope:
        step(f"loading {model}, once")
        return Microscope(loading.model(model), loading.code(model))

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
