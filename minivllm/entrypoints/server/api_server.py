"""The API server: OpenAI's routes, and some of vLLM's, over an `AsyncLLMEngine`. Mirrors vllm/entrypoints/openai/api_server.py.

    uvicorn ─► RequestMiddleware ─► KeyMiddleware ─► JsonRequest ─► route ─► AnswerResponse ─► Answer ─► engine.generate
               id, log, errors      401              413, 408       400, 404   429, deadline,    prompts in,
                                                                               disconnect        JSON out

`make_app` builds the app; `server.py` runs it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response

from minivllm import __version__
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.entrypoints.dashboard import add_dashboard
from minivllm.entrypoints.openai import response_bodies as bodies
from minivllm.entrypoints.openai.answer import Answer, check_length, tokenizer_of
from minivllm.entrypoints.openai.chat import ChatAnswer, encode_chat
from minivllm.entrypoints.openai.completions import CompletionAnswer
from minivllm.entrypoints.openai.errors import ApiError, add_error_handlers, quoted
from minivllm.entrypoints.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingBody,
    TokenizeRequest,
)
from minivllm.entrypoints.openai.responses.protocol import ResponsesRequest
from minivllm.entrypoints.openai.responses.serving import ResponsesAnswer
from minivllm.entrypoints.server.answer_response import AnswerResponse
from minivllm.entrypoints.server.middleware import OPEN_PATHS, KeyMiddleware, RequestMiddleware
from minivllm.entrypoints.server.replicas_api import describe_replicas
from minivllm.entrypoints.server.replicas_api import router as replicas_router
from minivllm.entrypoints.server.state import ServerState
from minivllm.errors import EngineDeadError, RequestError

BODY_SECONDS = 60.0
"""Time limit for receiving a request body."""
MAX_PARTS_OF_BODY = 20_000
"""Lists, objects and fields of a request: 2,048 messages of one part each have 14,337."""
BYTES_PER_VALUE = 5
"""A body may have as many values in its lists as the longest body has, if each takes so many bytes: token ids are mostly longer."""
_PARTS = (b"[", b"{", b":")
"""One for each list, object and field."""
DROP_SECONDS, DROP_BYTES = 5.0, 2**28
"""How long, and how much of, a body that is too long is received before it is refused."""
RANK_HEADER = "X-data-parallel-rank"
"""The replica that a request is to go to, as in vLLM; if that takes no requests, it goes to another."""
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": bodies.ErrorResponse,
        "description": "The request is invalid, too large, unauthorized, or over capacity (429).",
    },
    "5XX": {"model": bodies.ErrorResponse, "description": "The engine is unavailable (503), failed (500) or timed out (504)."},
}
_EVENTS = {
    "text/event-stream": {
        "schema": {  # of each event
            "type": "object",
            "properties": {"data": {"type": "string", "description": "A chunk or an error as JSON; in the last event, [DONE]."}},
            "required": ["data"],
        },
        "example": {"data": '{"choices":[{"index":0, ...}], ...}'},
    }
}


class JsonRequest(Request):
    """A request whose body must be strict JSON (no NaN, valid UTF-8, bounded nesting), not too long, and not too slow."""

    async def body(self) -> bytes:
        """The body. Raises an ApiError if it is too long, or does not arrive in time."""
        if not hasattr(self, "_body"):
            try:
                self._body = await asyncio.wait_for(self._read(), BODY_SECONDS)
            except asyncio.TimeoutError:
                raise ApiError(408, f"The body did not arrive within {BODY_SECONDS:g} seconds.") from None
            except ApiError:
                if "expect" not in self.headers:  # who expects an answer before the body gets it
                    await self._drop_rest()
                raise
        return self._body

    async def _read(self) -> bytes:
        body = bytearray()
        self._check_size(int(self.headers.get("content-length", 0)))
        async for chunk in self.stream():
            body += chunk
            self._check_size(len(body))
        return bytes(body)

    def _check_size(self, num_bytes: int) -> None:
        limit = _state(self).settings.max_request_bytes
        if num_bytes > limit:
            raise ApiError(413, f"The body is longer than this server's limit of {limit} bytes: send fewer prompts at a time.")

    async def _drop_rest(self) -> None:
        """Receive what a client still sends, within limits: it would see a broken connection instead of the answer."""

        async def drop() -> None:
            num_bytes = 0
            async for chunk in self.stream():
                num_bytes += len(chunk)
                if num_bytes > DROP_BYTES:
                    return

        if not self._stream_consumed:
            with contextlib.suppress(asyncio.TimeoutError, ClientDisconnect):
                await asyncio.wait_for(drop(), DROP_SECONDS)

    async def json(self) -> Any:
        """The body. Raises an ApiError that says where it is invalid, or that it has too many parts."""
        body = await self.body()
        check_num_parts(body, max_values=_state(self).settings.max_request_bytes // BYTES_PER_VALUE)
        try:
            content = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ApiError(400, f"The body is not JSON: {error}.") from None
        except RecursionError:
            raise ApiError(400, "The body is JSON that is nested too deeply.") from None
        await asyncio.sleep(0)  # others' turn, before it is validated
        return content


def check_num_parts(body: bytes, max_values: int) -> None:
    """Refuse JSON of many parts before it is parsed: a megabyte of tiny lists takes tenths of a second, in which nobody else is served.

    Args:
        body: The JSON.
        max_values: How many values the lists in it may have, all together.

    Raises:
        ApiError: There are more, or more than `MAX_PARTS_OF_BODY` lists, objects and fields.
    """
    num_parts, num_values = sum(map(body.count, _PARTS)), body.count(b",")
    if num_parts <= MAX_PARTS_OF_BODY and num_values <= max_values:  # most need no look at what is text
        return
    characters = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    is_text = np.logical_xor.accumulate(characters == ord('"'))
    counts = np.bincount(characters[~is_text], minlength=256)
    if sum(counts[ord(mark)] for mark in _PARTS) > MAX_PARTS_OF_BODY:
        raise ApiError(400, f"The body has more than {MAX_PARTS_OF_BODY} lists, objects and fields: send fewer at a time.")
    if counts[ord(",")] > max_values:
        raise ApiError(400, f"The body has more than {max_values} values: send fewer at a time.")


class JsonRoute(APIRoute):
    """A route that reads bodies as `JsonRequest`, and requires Content-Type application/json."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler behind a check of the Content-Type."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            content_type = request.headers.get("content-type", "")
            if self.body_field is not None and content_type.split(";")[0].strip().lower() != "application/json":
                raise ApiError(415, f"Content-Type is {quoted(content_type)}, but must be application/json.")
            return await handler(JsonRequest(request.scope, request.receive))

        return handle


router = APIRouter(route_class=JsonRoute, responses=_ERRORS)


def make_app(state: ServerState) -> FastAPI:
    """Build the app."""
    app = FastAPI(
        title="minivllm",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # it would go to a host that the client names
    )
    app.state.server = state
    app.include_router(router)
    app.include_router(replicas_router, responses=_ERRORS)
    add_dashboard(app, lambda: _healthy_engine(state), may_kill=state.settings.allow_kill)
    add_error_handlers(app)
    if state.settings.api_keys:
        app.add_middleware(KeyMiddleware, api_keys=state.settings.api_keys)
        _describe_keys(app)
    app.add_middleware(RequestMiddleware, closing=state.closing)  # the last one added runs first
    if origins := state.settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["X-Request-Id"]
        )
    return app


def _healthy_engine(state: ServerState) -> AsyncLLMEngine:
    state.engine.check_health()
    return state.engine


def _describe_keys(app: FastAPI) -> None:
    """Say in /openapi.json what needs a key."""
    description = app.openapi()
    description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    description["security"] = [{"key": []}]
    for path in OPEN_PATHS:
        description["paths"][path]["get"]["security"] = []


def _state(request: Request) -> ServerState:
    return request.app.state.server


def _check_model(request: Request, model: str | None) -> None:
    name = _state(request).engine.model_config.name
    if model is not None and model != name:
        raise ApiError(
            404, f"There is no model {quoted(model)}: this server serves {quoted(name)}.", param="model", code="model_not_found"
        )


def _answer(request: Request, body: SamplingBody, kind: Callable[..., Answer]) -> Response:
    _check_model(request, body.model)
    request.scope["minivllm.record"].ignored_fields = body.ignored_fields
    state = _state(request)
    answer = kind(state.engine, body)
    answer.data_parallel_rank = _read_rank(request)
    return AnswerResponse(state, answer)


def _read_rank(request: Request) -> int | None:
    """The replica that the request asks for."""
    rank = request.headers.get(RANK_HEADER)
    if rank is None:
        return None
    if not rank.isdecimal() or len(rank) > 5:
        raise ApiError(400, f"{RANK_HEADER} is {quoted(rank)}, but must be the rank of a replica: a number from 0 on.")
    return int(rank)


def _json(body: Any) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


# -- generating ----------------------------------------------------------------------------------------------------


@router.post("/v1/completions", responses={200: {"model": bodies.CompletionResponse, "content": _EVENTS}})
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Complete prompts."""
    return _answer(request, body, CompletionAnswer)


@router.post("/v1/chat/completions", responses={200: {"model": bodies.ChatCompletionResponse, "content": _EVENTS}})
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Generate the next message of a conversation."""
    return _answer(request, body, ChatAnswer)


@router.post("/v1/responses", responses={200: {"model": bodies.ResponsesResponse, "content": _EVENTS}})
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Generate the next message of a conversation, in the form of OpenAI's Responses API."""
    return _answer(request, body, ResponsesAnswer)


# -- tokens --------------------------------------------------------------------------------------------------------


@router.post("/tokenize", responses={200: {"model": bodies.TokenizeResponse}})
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    """Tokenize a text, or a conversation with the chat template applied."""
    _check_model(request, body.model)
    engine = _state(request).engine
    tokenizer = tokenizer_of(engine).hf_tokenizer
    if body.messages is not None:
        tokens = await encode_chat(engine, body.messages, body.add_generation_prompt)
    else:
        assert body.prompt is not None
        check_length(len(body.prompt), "characters", engine)
        tokens = await asyncio.to_thread(tokenizer.encode, body.prompt, add_special_tokens=body.add_special_tokens)
    return _json(
        {
            "count": len(tokens),
            "max_model_len": engine.input_processor.max_request_tokens,
            "tokens": tokens,
            "token_strs": tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None,
        }
    )


@router.post("/detokenize", responses={200: {"model": bodies.DetokenizeResponse}})
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    """Decode tokens, special ones included."""
    _check_model(request, body.model)
    engine = _state(request).engine
    check_length(len(body.tokens), "tokens", engine)
    vocab_size = engine.model_config.vocab_size
    if (largest := max(body.tokens, default=0)) >= vocab_size:
        raise RequestError(f"tokens has {largest}, but this model's ids go from 0 to {vocab_size - 1}.")
    return _json({"prompt": await asyncio.to_thread(tokenizer_of(engine).decode, body.tokens, False)})


# -- the server and its model --------------------------------------------------------------------------------------


@router.get("/v1/models", responses={200: {"model": bodies.ModelList}})
async def list_models(request: Request) -> Response:
    """List the one model that is served."""
    return _json({"object": "list", "data": [_model_card(_state(request))]})


@router.get("/v1/models/{model:path}", responses={200: {"model": bodies.ModelCard}})
async def retrieve_model(model: str, request: Request) -> Response:
    """Describe a model."""
    _check_model(request, model)
    return _json(_model_card(_state(request)))


def _model_card(state: ServerState) -> bodies.ModelCard:
    name = state.engine.model_config.name
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "minivllm",
        "root": name,
        "parent": None,
        "max_model_len": state.engine.input_processor.max_request_tokens,
    }


@router.head("/health", include_in_schema=False)
@router.get("/ping", responses={200: {"model": bodies.HealthResponse}})
@router.post("/ping", include_in_schema=False)
@router.get("/health", responses={200: {"model": bodies.HealthResponse}})
async def health(request: Request) -> Response:
    """Whether requests can be served; 503 with the reason if not."""
    state = _state(request)
    if state.closing.begun:
        raise EngineDeadError("The server is shutting down.")
    engine = state.engine
    engine.check_health()
    if engine.num_engines == 1:
        return _json({"status": "ok"})
    return _json({"status": "ok", "replicas": describe_replicas(engine)})


@router.get("/load", responses={200: {"model": bodies.LoadResponse}})
async def load(request: Request) -> Response:
    """How many requests are being answered, by this API server."""
    return _json({"server_load": _state(request).admission.num_requests})


@router.get("/version", responses={200: {"model": bodies.VersionResponse}})
async def version() -> Response:
    """The version of minivllm."""
    return _json({"version": __version__})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    engine_metrics = _state(request).engine.metrics
    return Response(engine_metrics.render(), headers={"Content-Type": engine_metrics.content_type})
