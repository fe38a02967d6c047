"""Errors of the API, in OpenAI's shape."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

KINDS = {401: "authentication_error", 429: "rate_limit_error", **dict.fromkeys((500, 503, 507), "server_error")}
"""Type of an error by status; all others are invalid_request_error."""

QUOTING = (
    *("prompt_cache.", "tools", "tool_choice", "response_format", "structured_outputs", "guided_"),
    *("json_schema", "grammar", "chat_template_kwargs", "messages"),
    *("input", "instructions", "system", "text.", "output_config"),
)
"""Beginnings of the names of fields of whose texts messages may quote a part."""


class APIError(Exception):
    """A request that is answered with an error.

    Attributes:
        status: HTTP status.
        param: field of the request that is wrong; None if it is none.
        code: OpenAI's code.
        headers: more headers of the response.
        rest_s: seconds for which the client waits for its answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})
        self.rest_s = 0.0

    @property
    def logged(self) -> str:
        """The message for the log, which has nothing of a request's texts."""
        is_length = self.param in ("messages", "input") and self.code == "context_length_exceeded"
        return f"'{self.param}' is wrong" if (self.param or "").startswith(QUOTING) and not is_length else str(self)

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response."""
        kind = KINDS.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def wrong(param: str, rule: str, *, code: str = "invalid_value") -> APIError:
    """The error for a field with a wrong value."""
    return APIError(400, f"'{param}' {rule}", param=param, code=code)


def missing(param: str) -> APIError:
    """The error for a field that a request must have."""
    return wrong(param, "is missing", code="missing_required_parameter")


def too_long(param: str, longest: int | None, what: str) -> APIError:
    """The error for a prompt that has no room however short its answer is, in the words that clients look for."""
    told = what if longest is None else f"This model's maximum context length is {longest} tokens. However, {what}"
    return APIError(400, told, param=param, code="context_length_exceeded")


def shown(text: str, length: int = 60) -> str:
    """A client's text in a message: printable, and shortened."""
    text = "".join(character if character.isprintable() else " " for character in text[: length + 1])
    text = text.encode(errors="replace").decode()
    return text if len(text) <= length else text[: length - 3] + "..."


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(dumps(value), status, headers, media_type="application/json")


def dumps(value: Any) -> bytes:
    """JSON in one line of ASCII."""
    return json.dumps(value, separators=(",", ":")).encode()
