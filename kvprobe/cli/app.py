"""The command that serves the page."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from kvprobe.cli.flags import Adapter, Chosen, Source, Whole
from kvprobe.errors import UserError
from kvprobe.models.catalogue import Dtype


def serve(
    model: Source = "smollm2-135m",
    *,
    chat: Annotated[Path | None, Parameter(help="A conversation in JSON or JSONL; an example by default.")] = None,
    conversation: Chosen = None,
    ask: Annotated[str, Parameter(help="The user's next message.")] = "What did I say first?",
    port: Annotated[Whole, Parameter(help="On this machine; a free one by default.")] = 0,
    open: Annotated[bool, Parameter(help="Open the page in the browser.", negative="--no-open")] = True,
    adapter: Adapter = None,
    device: str = "auto",
    dtype: Dtype = "auto",
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

    start = None if chat is None else Address.of_chat(read_chat(chat, conversation), ask)

    def load(step: Step) -> Microscope:
        step(f"loading {model}, once")
        from kvprobe.inference.model import load

        return Microscope(load(model, adapter=adapter, device=device, dtype=dtype))

    try:
        listening = socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        raise UserError(f"Port {port} of this machine cannot be used ({error}); give another, or none.") from error
    app, address = served(load, listening.getsockname()[1], start)
    print(f"The microscope on {model}: {address}\nOnly this machine can open it, with this address. Ctrl+C ends it.")
    if open:
        import webbrowser

        webbrowser.open(address)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    server.run(sockets=[listening])
