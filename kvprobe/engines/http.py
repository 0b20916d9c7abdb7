"""An inference server that is asked and answers in JSON over HTTP."""

import io
import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, InvalidURL
from typing import Any, ClassVar, TypeVar, cast
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import AbstractHTTPHandler, HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from kvprobe.arguments import check_fields
from kvprobe.checks import require
from kvprobe.errors import UserError
from kvprobe.names import one_line, shown

Value = TypeVar("Value")

MOST_BYTES = 2**28
"""Of a reply; all log-probabilities of 32 tokens of a large vocabulary are a tenth of it each."""
_PIECE = 2**16
_MOST_LOG = 0.01
"""Above all errors of the logarithm of a probability."""


class RefusedError(UserError):
    """A server answers, and refuses.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, sentence: str, status: int = 0) -> None:
        super().__init__(sentence)
        self.status = status


@dataclass(frozen=True)
class JsonServer:
    """A server.

    Attributes:
        url: of the server.
        timeout: seconds that it may take for a whole answer.
    """

    url: str
    timeout: float = 120.0
    kind: ClassVar[str] = "an inference server"

    def __post_init__(self) -> None:
        check_fields(self)
        require("timeout", self.timeout, 0.001, 10**6)
        try:
            known = urlsplit(self.url).scheme in ("http", "https")
        except ValueError:
            known = False
        if not known:
            raise self._misnamed()

    def ask(self, place: str, body: Mapping[str, object] | None = None) -> Any:
        """What it answers, None where that is nothing. Without a body it is asked by GET.

        Raises:
            RefusedError: it refuses.
            UserError: it cannot be reached, or does not answer in JSON.
        """
        text = self.text_at(place, body)
        try:
            return json.loads(text) if text else None
        except (ValueError, RecursionError) as error:
            raise self._strange(error) from error

    def text_at(self, place: str, body: Mapping[str, object] | None = None) -> str:
        """What it answers, as it is.

        Raises:
            RefusedError: it refuses.
            UserError: it cannot be reached, or does not answer with a text.
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            request = Request(self.url.rstrip("/") + place, data, {"Content-Type": "application/json"})
            opener = build_opener(_NoRedirects, _HttpInTime, _HttpsInTime)
            with opener.open(request, timeout=self.timeout) as reply:
                return _whole(reply).decode()
        except HTTPError as error:
            raise RefusedError(f"The server at {self.url} refuses {place}: {_reason(error)}.", error.code) from error
        except InvalidURL as error:
            raise self._misnamed() from error
        except (URLError, OSError) as error:
            raise UserError(
                f"No server answers at {self.url} ({one_line(error)}); start {self.kind} there, or give its URL."
            ) from error
        except (ValueError, HTTPException) as error:
            raise self._strange(error) from error

    def read(self, what: Callable[[Any], Value], place: str, body: Mapping[str, object] | None = None) -> Value:
        """What a function takes from an answer.

        Raises:
            UserError: as `ask`, or the answer is not what such a server gives.
        """
        reply = self.ask(place, body)
        try:
            return what(reply)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise self._strange(error) from error

    def _strange(self, error: Exception) -> UserError:
        return UserError(
            f"What {self.url} answers is not what {self.kind} answers ({one_line(error)}); give the URL of one of 2026."
        )

    def _misnamed(self) -> UserError:
        return UserError(f"{shown(self.url)} is no URL of {self.kind}; give one such as http://127.0.0.1:8080.")


class _NoRedirects(HTTPRedirectHandler):
    """Follows no redirect: what was asked by POST would be asked by GET there, without its content."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


class _InTime(AbstractHTTPHandler):
    """Opens connections on which a whole answer has the time that urllib gives each piece of it."""

    def do_open(self, http_class: Any, req: Any, **settings: Any) -> HTTPResponse:
        return super().do_open(partial(_in_time, http_class, req.timeout), req, **settings)


class _HttpInTime(_InTime, HTTPHandler):
    pass


class _HttpsInTime(_InTime, HTTPSHandler):
    pass


def _in_time(kind: Any, seconds: float, host: str, **settings: Any) -> HTTPConnection:
    connection = kind(host, **settings)
    connection.response_class = partial(_Answer, time.monotonic() + seconds)
    return connection


class _Answer(HTTPResponse):
    """An answer that must have come by a deadline: its status, headers and content."""

    def __init__(self, deadline: float, sock: socket.socket, *arguments: Any, **settings: Any) -> None:
        super().__init__(sock, *arguments, **settings)
        self.fp = io.BufferedReader(_Stream(sock, self.fp.detach(), deadline))


class _Stream(io.RawIOBase):
    """What comes from a socket until a deadline."""

    def __init__(self, sock: socket.socket, stream: io.RawIOBase, deadline: float) -> None:
        self._sock, self._stream, self._deadline = sock, stream, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)
        return self._stream.readinto(buffer)

    def close(self) -> None:
        self._stream.close()
        super().close()


def count_in(value: object) -> int:
    """A number of an answer that counts something, or of a token.

    Raises:
        ValueError: it is something else.
    """
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(f"{shown(value)} where it counts, or names a token")
    return value


def log_probability_in(value: object) -> float:
    """The logarithm of a probability in an answer; NaN passes.

    Raises:
        ValueError: it is something else.
    """
    if type(value) not in (int, float) or (number := float(cast(float, value))) > _MOST_LOG:
        raise ValueError(f"{shown(value)} where the logarithm of a probability is expected")
    return number


def _whole(reply: HTTPResponse) -> bytes:
    """All of an answer."""
    pieces, size = list[bytes](), 0
    while piece := reply.read1(_PIECE):
        pieces.append(piece)
        size += len(piece)
        if size > MOST_BYTES:
            raise ValueError(f"it is longer than {MOST_BYTES:,} bytes")
    if reply.length:
        raise ValueError(f"it ends {reply.length:,} bytes early")
    return b"".join(pieces)


def _reason(error: HTTPError) -> str:
    """What a server says about its refusal."""
    if leads_to := error.headers.get("Location"):
        return f"it redirects to {shown(leads_to)}"
    try:
        return one_line(ValueError(json.loads(error.read(_PIECE))["error"]["message"]))
    except (ValueError, LookupError, TypeError, OSError, HTTPException):
        return f"status {error.code}"
