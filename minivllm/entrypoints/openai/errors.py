"""Errors as OpenAI's clients expect them: a status code, and a body {"error": {"message", "type", "param", "code"}}.

Whatever goes wrong becomes an `ApiError`: a value out of range, an unknown route, a full server, a dead engine. Its body is sent as
the answer, or as an event if the answer streams already. Nothing answers with status 422: a client of OpenAI expects 400.
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

from minivllm.entrypoints.openai.responses import ErrorResponse
from minivllm.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)

RETRY_SECONDS = {429: 1, 503: 5}
"""What Retry-After says, by status code."""

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
_MAX_MESSAGE = 1000
"""Characters of an error message: it may quote what was given, and that may be long."""

_EXPECTED = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists, none of them empty",
    "stop": "a string, or a list of at most 64 strings",
    "content": "text, or a list of parts of type text (images, audio and files are not served)",
}
"""What a field that takes several types must be, by its name."""

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
"""What a field must be, by the first word of pydantic's name for the mistake ("int_type", "bool_parsing")."""


class ApiError(HTTPException):
    """A request that gets an error for an answer.

    Args:
        status_code: HTTP's.
        message: One sentence for a person: what was given, what was expected, what to do.
        param: The field of the request that is wrong, if it is one.
        code: OpenAI's short name for some errors, for example "model_not_found".
        headers: Sent with the answer. 429 and 503 get a Retry-After by themselves.
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
        """What OpenAI's clients read."""
        kind = _TYPES.get(self.status_code, "invalid_request_error" if self.status_code < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The answer."""
        body = msgspec.json.encode(self.body)
        return Response(body, self.status_code, dict(self.headers or {}), media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """The `ApiError` that stands for any error. What nobody foresaw is logged, and told without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return ApiError(400, str(error), param=_first_word(str(error)))
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    if isinstance(error, RequestValidationError):
        message, param = describe_mistake(error.errors()[0])
        return ApiError(400, message, param=param)
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, str(error.detail), headers=error.headers)
    logger.error("A request failed in a way that nobody foresaw.", exc_info=error)
    return ApiError(500, f"The server failed ({type(error).__name__}); its log says more.")


def add_error_handlers(app: FastAPI) -> None:
    """Make every error of the app an answer in OpenAI's form."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and not isinstance(error, ApiError):
            error = _routing_error(request, error)
        return as_api_error(error).response()

    for kind in (HTTPException, RequestValidationError, RequestError, EngineDeadError):
        app.add_exception_handler(kind, answer)


def _routing_error(request: Request, error: HTTPException) -> ApiError:
    """No such path, or another method than those that the path takes."""
    path = f"{request.method} {quoted(request.url.path)[1:-1]}"
    message = str(error.detail)
    if error.status_code == 404:
        message = f"There is no {path}: see /openapi.json for what there is."
    elif error.status_code == 405:
        message = f"{path} is not possible: use {(error.headers or {}).get('Allow', 'another method')}."
    return ApiError(error.status_code, message, headers=error.headers)


def describe_mistake(mistake: Mapping[str, Any]) -> tuple[str, str | None]:
    """One of pydantic's errors as a sentence, and the field that it is about ("messages.0.role"; None for the whole body).

    The sentence opens with the field's name.
    """
    kind, context = mistake["type"], mistake.get("ctx") or {}
    if kind == "value_error":  # one of our own checks; its sentence opens with the field's name
        message = str(context["error"])
        return message, _first_word(message)
    path = _field_path(mistake["loc"])
    name = path or "The request"
    param = path or None
    field = name.rsplit(".", 1)[-1]
    if kind == "missing":
        expected = f": give {_EXPECTED[field]}" if field in _EXPECTED else ", but it is needed: add it"
        return f"{name} is missing{expected}.", param
    given = quoted(mistake.get("input"))
    if field in _EXPECTED:
        return f"{name} is {given}, but must be {_EXPECTED[field]}.", param
    limits = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    for limit, words in limits.items():
        if limit in context:
            return f"{name} is {given}, but must be {words} {context[limit]:g}.", param
    if kind in ("too_long", "too_short"):
        bound, words = ("max_length", "at most") if kind == "too_long" else ("min_length", "at least")
        return f"{name} has {context['actual_length']} entries, but must have {words} {context[bound]}.", param
    if kind == "literal_error":
        return f"{name} is {given}, but must be {context['expected']}.", param
    if expected := _KINDS.get(kind.split("_")[0]):
        return f"{name} is {given}, but must be {expected}.", param
    return f"{name} is wrong: {mistake['msg']}.", param


def _field_path(location: Sequence[str | int]) -> str:
    """Where a mistake is, without what pydantic adds for the branches of a union."""
    path: list[str] = []
    for part in location[1:]:  # the first is "body"
        path.append(str(part))
        if part in _EXPECTED:
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
    except (TypeError, ValueError):  # no JSON, or a number of thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else text[:57] + "..."


def _first_word(message: str) -> str | None:
    """The field that a sentence of ours opens with ("top_p is 0, ..."), or None if it opens otherwise."""
    word, _, rest = message.partition(" ")
    return word if word.islower() and rest.split(" ", 1)[0] in ("is", "has", "must", "contains", "does", "or") else None
