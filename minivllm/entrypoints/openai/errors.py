"""Errors as OpenAI's clients expect them: a status code, and a body {"error": {"message", "type", "param", "code"}}.

Every failure becomes an `ApiError`: a value out of range, an unknown route, a full server, a dead engine. Its body is the response, or
an event if streaming has begun. Invalid requests get status 400, not FastAPI's 422, as OpenAI's clients expect.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from typing_extensions import TypedDict

from minivllm.entrypoints.openai.limits import EXPECTED
from minivllm.errors import ContextLengthError, EngineDeadError, ModelLoadError, RequestError, RequestGivenUpError

logger = logging.getLogger(__name__)

RETRY_SECONDS = {429: 1, 503: 5}
"""Retry-After by status code."""

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
_MAX_MESSAGE = 1000
"""Longest error message, in characters: it may quote the input."""

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "string": "a string",
    "bool": "true or false",
    "list": "a list",
    "dict": "an object",
    "model": "an object",
}
"""What a field must be, by the first word of pydantic's error type ("int_type", "bool_parsing")."""


class ErrorDetail(TypedDict):
    """An error."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(TypedDict):
    """The body of every error response, and of the event that ends a failed stream."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An error response.

    Args:
        status_code: HTTP's. With 429 and 503 the response has a Retry-After.
        message: What was given, what was expected, what to do.
        param: The invalid field, if any.
        code: OpenAI's error code, if any: "model_not_found", for example.
        headers: Of the response.
    """

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        retry = {"Retry-After": str(RETRY_SECONDS[status_code])} if status_code in RETRY_SECONDS else {}
        super().__init__(status_code, message, {**retry, **(headers or {})})
        self.message = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."
        self.param = param
        self.code = code

    @property
    def body(self) -> ErrorResponse:
        """The JSON that OpenAI's clients expect."""
        kind = _TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The HTTP response."""
        body = msgspec.json.encode(self.body)
        return Response(body, self.status_code, dict(self.headers or {}), media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """Convert any exception. Unexpected ones are logged, and reported without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=_first_word(str(error)))
    if isinstance(error, ModelLoadError):  # the chat template
        return ApiError(500, str(error))
    if isinstance(error, RequestGivenUpError):  # stops OpenAI's client from retrying
        return ApiError(500, str(error), code="request_given_up", headers={"x-should-retry": "false"})
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, RequestValidationError):
        message, param = describe_mistake(error.errors()[0])
        return ApiError(400, message, param=param)
    if isinstance(error, RecursionError):
        return ApiError(400, "The request is nested too deeply.")
    logger.error("Unexpected error while serving a request.", exc_info=error)
    return ApiError(500, f"Internal server error ({type(error).__name__}): see the server's log.")


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error of the app in OpenAI's format."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and not isinstance(error, ApiError):
            error = _routing_error(request, error)
        return as_api_error(error).response()

    for kind in (HTTPException, RequestValidationError, RequestError, EngineDeadError, ModelLoadError):
        app.add_exception_handler(kind, answer)


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    """An unknown path or method."""
    path = f"{request.method} {quoted(request.url.path)[1:-1]}"
    message = str(error.detail)
    if error.status_code == 404:
        message = f"There is no {path}: see /openapi.json for the available routes."
    elif error.status_code == 405:
        message = f"{path} is not allowed: use {(error.headers or {}).get('Allow', 'another method')}."
    return ApiError(error.status_code, message, headers=error.headers)


def describe_mistake(mistake: Mapping[str, Any]) -> tuple[str, str | None]:
    """One of pydantic's errors as a sentence that opens with the field's name, and the field ("messages.0.role"; None for the body)."""
    kind, context = mistake["type"], mistake.get("ctx") or {}
    if kind == "value_error":  # one of our own checks; its sentence opens with the field's name
        message = str(context["error"])
        return message, _first_word(message)
    param = _field_path(mistake["loc"]) or None
    name = param or "The request"
    field = name.rsplit(".", 1)[-1]
    if kind == "missing":
        expected = f": give {EXPECTED[field]}" if field in EXPECTED else ", but it is needed: add it"
        return f"{name} is missing{expected}.", param
    given = quoted(mistake.get("input"))
    if field in EXPECTED:
        return f"{name} is {given}, but must be {EXPECTED[field]}.", param
    for limit, words in {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}.items():
        if limit in context:
            return f"{name} is {given}, but must be {words} {context[limit]}.", param
    for limit, words in {"min_length": "at least", "max_length": "at most"}.items():
        if limit in context:
            parts = "characters" if kind.startswith("string") else "entries"
            return f"{name} has {len(mistake['input'])} {parts}, but must have {words} {context[limit]}.", param
    if kind == "literal_error":
        return f"{name} is {given}, but must be {context['expected']}.", param
    if expected := _KINDS.get(kind.split("_")[0]):
        return f"{name} is {given}, but must be {expected}.", param
    return f"{name} is wrong: {mistake['msg']}.", param


def _field_path(location: Sequence[str | int]) -> str:
    """A field's path, without pydantic's parts for the branches of a union."""
    path: list[str] = []
    for part in location[1:]:  # the first is "body"
        path.append(str(part))
        if part in EXPECTED:
            break
    return ".".join(path)


def quoted(value: Any) -> str:
    """A value as JSON, short enough for a sentence."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "an object"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):  # not JSON, or an integer of thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _first_word(message: str) -> str | None:
    """The field that one of our messages opens with ("top_p is 0, ..."), if any."""
    word, _, rest = message.partition(" ")
    return word if word.islower() and rest.split(" ", 1)[0] in ("is", "has", "must", "contains", "does", "or", "cannot") else None
