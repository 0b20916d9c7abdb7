"""An inference server that is asked and answers in JSON over HTTP."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from kvprobe.errors import UserError
from kvprobe.names import one_line

Value = TypeVar("Value")

MOST_BYTES = 2**28
"""Of a reply; all log-probabilities of 32 tokens of a large vocabulary are a tenth of it each."""


class RefusedError(UserError):
    """A server answers, and refuses."""


@dataclass(frozen=True)
class JsonServer:
    """A server.

    Attributes:
        url: of the server.
        timeout: seconds that it may take for an answer.
    """

    url: str
    timeout: float = 120.0
    kind: ClassVar[str] = "an inference server"

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
            with urlopen(request, timeout=self.timeout) as reply:
                text = reply.read(MOST_BYTES + 1)
            if len(text) > MOST_BYTES:
                raise self._strange(ValueError(f"it is longer than {MOST_BYTES:,} bytes"))
            return text.decode()
        except HTTPError as error:
            raise RefusedError(f"The server at {self.url} refuses {place}: {_reason(error)}.") from error
        except (URLError, OSError) as error:
            raise UserError(
                f"No server answers at {self.url} ({one_line(error)}); start {self.kind} there, or give its URL."
            ) from error
        except ValueError as error:
            raise error if isinstance(error, UserError) else self._strange(error) from error

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


def _reason(error: HTTPError) -> str:
    """What a server says about its refusal."""
    try:
        return one_line(ValueError(json.loads(error.read(2**16))["error"]["message"]))
    except (ValueError, LookupError, TypeError, OSError):
        return f"status {error.code}"
