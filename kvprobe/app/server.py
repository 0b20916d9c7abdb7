"""The page's server: on this machine alone, for those who know the token in its address, and for no other page."""

import hmac
import json
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvprobe.app.address import Address, address_of
from kvprobe.app.page import TYPES, asset, example, live_page, offline_page
from kvprobe.app.work import Job, Step, Worker
from kvprobe.errors import UserError

if TYPE_CHECKING:
    from kvprobe.app.microscope import Microscope

MOST_BYTES, MOST_SHARED = 2**20, 2**26
"""Of a request; of one that shares a session."""
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; connect-src 'self'; "
    "img-src data: blob:; script-src 'self'; style-src 'self'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LoadMicroscope = Callable[[Step], "Microscope"]


class Guarded:
    """Lets through what asks this address by name, with its token, from no other page; everything else is refused."""

    def __init__(self, app: ASGIApp, token: str, port: int) -> None:
        self.app, self.token = app, token
        self.hosts = {f"{host}:{port}".encode() for host in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refused := self._refused(scope)):
            await PlainTextResponse(refused, 403, HEADERS)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _refused(self, scope: Scope) -> str:
        headers = scope["headers"]
        hosts = [value for name, value in headers if name == b"host"]
        origins = [value for name, value in headers if name == b"origin"]
        sites = [value for name, value in headers if name == b"sec-fetch-site"]
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return "This server answers to its own address alone."
        if any(origin not in {b"http://" + host for host in self.hosts} for origin in origins):
            return "This server answers no other page."
        if any(site not in (b"same-origin", b"none") for site in sites):
            return "This server answers no other page."
        token = scope["path"].partition("/")[2].partition("/")[0].encode()
        if not hmac.compare_digest(token, self.token.encode()):
            return "The address lacks its token; open the one that `kvprobe app` printed."
        return ""


def application(
    load: LoadMicroscope, port: int, start: Address | None = None, token: str | None = None, of_example: bool = True
) -> Any:
    """The application of a server, and its token.

    Args:
        load: gives the microscope, when it is first needed; its steps are shown.
        start: the conversation that it offers; that of the example by default.
        of_example: whether the model is the one of the example, whose states then need not be computed.
    """
    worker, token = Worker(), token or secrets.token_urlsafe(24)
    loaded: list[Microscope] = []
    # What models need takes seconds to import; the page is served, and read, meanwhile.
    worker.add(lambda step: bool(import_module("kvprobe.app.microscope")))

    def computed(address: Address, attention: bool, read: bool, step: Step) -> dict[str, Any]:
        if not loaded:
            loaded.append(load(step))
        return loaded[0].state(address, attention=attention, read=read, step=step).to_plain()

    async def page(request: Request) -> Response:
        return HTMLResponse(live_page())

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        try:
            return Response(asset(name), media_type=TYPES[name[name.rindex(".") :]])
        except (KeyError, ValueError):
            return PlainTextResponse("There is no such file.", 404)

    async def session(request: Request) -> Response:
        given = example() if of_example else {"start": example()["start"], "states": []}
        if start is not None:
            address = {"messages": [vars(message) for message in start.messages], "ask": start.ask, "edits": []}
            given = {"start": {**address, "new": start.new}, "states": given["states"]}
        return JSONResponse(given)

    async def ask(request: Request) -> Response:
        content = await _content(request, MOST_BYTES)
        try:
            address = address_of(content.get("address"))
        except UserError as error:  # as work that fails, so that browsers note no error of the page
            return JSONResponse({"job": worker.note(Job.failed(str(error))).name})
        attention, read = (content.get(name) is True for name in ("attention", "read"))
        return JSONResponse({"job": worker.add(partial(computed, address, attention, read)).name})

    async def listen(request: Request) -> Response:
        job = _job(worker, request)
        return StreamingResponse(_stream(job), media_type="text/event-stream")

    async def cancel(request: Request) -> Response:
        await _content(request, MOST_BYTES)
        _job(worker, request).cancelled = True
        return JSONResponse({})

    async def share(request: Request) -> Response:
        content = await _content(request, MOST_SHARED)
        disposition = {"Content-Disposition": 'attachment; filename="kvprobe.html"'}
        return HTMLResponse(offline_page(content), headers=disposition)

    return Starlette(
        routes=[
            Route(f"/{token}/", page),
            Route(f"/{token}/static/{{name}}", static),
            Route(f"/{token}/session.json", session),
            Route(f"/{token}/jobs", ask, methods=["POST"]),
            Route(f"/{token}/jobs/{{job}}", listen),
            Route(f"/{token}/jobs/{{job}}/cancel", cancel, methods=["POST"]),
            Route(f"/{token}/share", share, methods=["POST"]),
        ],
        exception_handlers={UserError: _refusal},
    ), token


def served(
    load: LoadMicroscope, port: int, start: Address | None = None, of_example: bool = True
) -> tuple[ASGIApp, str]:
    """The application with its guard, and the address to open."""
    app, token = application(load, port, start, of_example=of_example)
    return _with_headers(Guarded(app, token, port)), f"http://127.0.0.1:{port}/{token}/"


def _with_headers(app: ASGIApp) -> ASGIApp:
    """The application with its security headers on every response."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                known = {name for name, _ in message["headers"]}
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in known)]
            await send(message)

        await app(scope, receive, sent)

    return answer


async def _content(request: Request, most: int) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        UserError: it is another type, too large, or no JSON object.
    """
    if request.headers.get("content-type") != "application/json":
        raise UserError("The request is not JSON; send application/json.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise UserError(f"The request is larger than {most:,} bytes; send less.")
    try:
        content = json.loads(bytes(body), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UserError("The request is not JSON; send an object.") from error
    if not isinstance(content, dict):
        raise UserError("The request is not a JSON object; send one.")
    return content


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _job(worker: Worker, request: Request) -> Job:
    name = request.path_params["job"]
    if name not in worker.jobs:
        raise UserError("There is no such request any more; ask again.")
    return worker.jobs[name]


def _stream(job: Job) -> Iterator[str]:
    for what, content in job.events():
        yield ": waiting\n\n" if what == "wait" else f"event: {what}\ndata: {json.dumps(content)}\n\n"


async def _refusal(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)
