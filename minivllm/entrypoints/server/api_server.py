"""The API server: OpenAI's routes, and some of vLLM's, over an `AsyncLLMEngine`. Mirrors `vllm/entrypoints/openai/api_server.py`.

    uvicorn ─► RequestMiddleware ─► KeyMiddleware ─► JsonRequest ─► route ─► AnswerResponse ─► Answer ─► engine.generate
               id, log, errors      401              413, 408       400, 404   429, deadline,    prompts in,
                                                                               disconnect        JSON out

`make_app` builds the app; `launcher.py` runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import PlainTextResponse, Response
from typing_extensions import NotRequired, TypedDict

from minivllm import __version__
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.entrypoints.dashboard.app import add_dashboard
from minivllm.entrypoints.openai.answer import Answer
from minivllm.entrypoints.openai.chat.protocol import ChatCompletionRequest, ChatCompletionResponse
from minivllm.entrypoints.openai.chat.serving import ChatAnswer
from minivllm.entrypoints.openai.completions.protocol import CompletionRequest, CompletionResponse
from minivllm.entrypoints.openai.completions.serving import CompletionAnswer
from minivllm.entrypoints.openai.errors import ApiError, ErrorResponse, add_error_handlers, quoted
from minivllm.entrypoints.openai.protocol import ModelCard, ModelList, SamplingBody
from minivllm.entrypoints.openai.responses.protocol import ResponsesRequest, ResponsesResponse
from minivllm.entrypoints.openai.responses.serving import ResponsesAnswer
from minivllm.entrypoints.server.answer_response import AnswerResponse
from minivllm.entrypoints.server.json_route import JsonRoute
from minivllm.entrypoints.server.middleware import (
    OPEN_PATHS,
    GenerationCors,
    KeyMiddleware,
    OriginMiddleware,
    RequestMiddleware,
    salt_of_key,
)
from minivllm.entrypoints.server.replicas_api import ReplicaHealth, describe_replicas
from minivllm.entrypoints.server.replicas_api import router as replicas_router
from minivllm.entrypoints.server.state import ServerState, check_model, state_of
from minivllm.entrypoints.server.tokenize_api import router as tokenize_router
from minivllm.errors import EngineDeadError

RANK_HEADER = "X-data-parallel-rank"
"""Sends a request to a replica of the client's choice, as in vLLM; to another if that one takes no requests."""
_ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": ErrorResponse,
        "description": "The request is invalid, too large, unauthorized, or over capacity (429).",
    },
    "5XX": {"model": ErrorResponse, "description": "The engine is unavailable (503), failed (500) or timed out (504)."},
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


router = APIRouter(route_class=JsonRoute, responses=_ERRORS)


class HealthResponse(TypedDict):
    """The response of /health; with `replicas` if there are several, and only for those who have a key if there is one."""

    status: Literal["ok"]
    replicas: NotRequired[list[ReplicaHealth]]


class LoadResponse(TypedDict):
    """The response of /load."""

    server_load: int


class VersionResponse(TypedDict):
    """The response of /version."""

    version: str


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
    app.include_router(tokenize_router, responses=_ERRORS)
    app.include_router(replicas_router, responses=_ERRORS)
    add_dashboard(app, lambda: _healthy_engine(state), may_kill=state.settings.allow_kill)
    add_error_handlers(app)
    if state.settings.api_keys:
        app.add_middleware(KeyMiddleware, api_keys=state.settings.api_keys)
        _describe_keys(app)
    app.add_middleware(OriginMiddleware, allowed_hosts=state.settings.known_hosts)
    app.add_middleware(RequestMiddleware, closing=state.closing)  # the last one added runs first
    if origins := state.settings.allowed_origins:
        app.add_middleware(GenerationCors, origins=origins)
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


def _answer(request: Request, body: SamplingBody, kind: Callable[..., Answer]) -> Response:
    check_model(request, body.model)
    request.scope["minivllm.record"].ignored_fields = body.ignored_fields
    state = state_of(request)
    answer = kind(state.engine, body)
    answer.data_parallel_rank = _read_rank(request)
    if state.settings.salt_by_key and answer.cache_salt is None:
        answer.cache_salt = salt_of_key(request.headers.get("authorization", ""))
    return AnswerResponse(state, answer)


def _read_rank(request: Request) -> int | None:
    """The replica that the request asks for."""
    rank = request.headers.get(RANK_HEADER)
    if rank is None:
        return None
    if not rank.isdecimal() or len(rank) > 5:
        raise ApiError(400, f"{RANK_HEADER} is {quoted(rank)}, but must be the rank of a replica: a number from 0 on.")
    return int(rank)


# -- generating ----------------------------------------------------------------------------------------------------


@router.post("/v1/completions", responses={200: {"model": CompletionResponse, "content": _EVENTS}})
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Complete prompts."""
    return _answer(request, body, CompletionAnswer)


@router.post("/v1/chat/completions", responses={200: {"model": ChatCompletionResponse, "content": _EVENTS}})
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Generate the next message of a conversation."""
    return _answer(request, body, ChatAnswer)


@router.post("/v1/responses", responses={200: {"model": ResponsesResponse, "content": _EVENTS}})
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Generate the next message of a conversation, in the form of OpenAI's Responses API."""
    return _answer(request, body, ResponsesAnswer)


# -- the server and its model --------------------------------------------------------------------------------------


@router.get("/v1/models")
async def list_models(request: Request) -> ModelList:
    """List the one model that is served."""
    return {"object": "list", "data": [_model_card(state_of(request))]}


@router.get("/v1/models/{model:path}")
async def retrieve_model(model: str, request: Request) -> ModelCard:
    """Describe a model."""
    check_model(request, model)
    return _model_card(state_of(request))


def _model_card(state: ServerState) -> ModelCard:
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
@router.get("/ping")
@router.post("/ping", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> HealthResponse:
    """Whether requests can be served; 503 if not, with the reason for those who have a key if there is one."""
    state = state_of(request)
    if state.closing.begun:
        raise EngineDeadError("The server is shutting down.")
    is_known = not state.settings.api_keys or request.scope["minivllm.has_key"]
    try:
        state.engine.check_health()
    except EngineDeadError:
        if is_known:
            raise
        raise EngineDeadError("The server cannot answer requests: its log says why.") from None
    if state.engine.num_engines == 1 or not is_known:
        return {"status": "ok"}
    return {"status": "ok", "replicas": describe_replicas(state.engine)}


@router.get("/load")
async def load(request: Request) -> LoadResponse:
    """How many requests are being answered, by this API server."""
    return {"server_load": state_of(request).admission.num_requests}


@router.get("/version")
async def version() -> VersionResponse:
    """The version of minivllm."""
    return {"version": __version__}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    engine_metrics = state_of(request).engine.metrics
    return Response(engine_metrics.render(), headers={"Content-Type": engine_metrics.content_type})
