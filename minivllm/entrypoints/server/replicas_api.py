"""Routes for operators: list the replicas, restart one, kill one to see what happens.

    GET  /replicas                  all of them, even while none is ready
    POST /replicas/scale            {"size": 4}: start further ones, or let the last ones finish their requests and end
    POST /replicas/{rank}/restart   it finishes its requests while others get the new ones, and is then replaced
    POST /replicas/{rank}/kill      with --allow-kill: its process is killed, and other replicas continue its requests

A POST needs `Content-Type: application/json`, which a page of another site may send only after asking (CORS), and pages of other origins are refused.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from typing_extensions import TypedDict

from minivllm.data_parallel.liveness import MAX_REPLICAS
from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.core_messages import SchedulerStats
from minivllm.entrypoints.openai.errors import ApiError
from minivllm.entrypoints.openai.protocol import Body
from minivllm.entrypoints.server.json_route import JsonRoute, has_json
from minivllm.entrypoints.server.state import ServerState, state_of
from minivllm.errors import ConfigError

router = APIRouter(route_class=JsonRoute)


class ReplicaHealth(TypedDict):
    """A replica in the response of /health: its sequences, its cache, its recent tokens per second, and how often it has died."""

    rank: int
    state: str
    process_id: int | None
    waiting: int
    running: int
    kv_cache_usage: float
    num_gpu_blocks: int
    num_used_blocks: int
    tokens_per_second: float
    deaths: int


class ReplicasResponse(TypedDict):
    """The response of /replicas: all that are there, how many there are to be, and what became of streams whose replica was lost."""

    replicas: list[ReplicaHealth]
    size: int
    streams_resumed: int
    streams_lost: int


class AcceptedResponse(TypedDict):
    """The response to a request that is carried out soon."""

    status: Literal["restarting", "killed", "scaling"]


class ScaleRequest(Body):
    """The body of POST /replicas/scale."""

    size: Annotated[int, Field(ge=1, le=MAX_REPLICAS, description="How many replicas there are to be.")]


def describe_replicas(engine: AsyncLLMEngine) -> list[ReplicaHealth]:
    """Each replica, in the order of ranks."""
    replicas: list[ReplicaHealth] = []
    for status in engine.replicas.statuses():
        stats = engine.stats_by_engine.get(status.rank, SchedulerStats())
        replicas.append(
            {
                "rank": status.rank,
                "state": status.state,
                "process_id": status.process_id or None,
                **stats.load._asdict(),
                "num_gpu_blocks": status.num_gpu_blocks,
                "num_used_blocks": stats.num_used_blocks,
                "tokens_per_second": round(engine.tokens_per_second(status.rank), 1),
                "deaths": status.num_deaths,
            }
        )
    return replicas


@router.get("/replicas")
async def list_replicas(request: Request) -> ReplicasResponse:
    """All replicas."""
    engine = state_of(request).engine
    resumed, lost = engine.metrics.count("num_resumed_requests"), engine.metrics.count("num_lost_requests")
    replicas, size = describe_replicas(engine), engine.num_engines
    return {"replicas": replicas, "size": size, "streams_resumed": resumed, "streams_lost": lost}


@router.post("/replicas/{rank}/restart", status_code=202)
async def restart_replica(rank: int, request: Request) -> AcceptedResponse:
    """Let a replica finish its requests, and replace it."""
    state = _checked(request, rank)
    _check_may_manage(state)
    if not state.engine.replicas.restart(rank):
        what = f"Replica {rank} is {_state_of(state, rank)}, and only one that is ready can be restarted"
        raise ApiError(409, f"{what}: try again later.")
    return {"status": "restarting"}


@router.post("/replicas/scale", status_code=202)
async def scale_replicas(body: ScaleRequest, request: Request) -> AcceptedResponse:
    """Have so many replicas."""
    state = state_of(request)
    _check_may_manage(state)
    try:
        state.engine.replicas.scale(body.size)
    except ConfigError as error:
        raise ApiError(400, str(error)) from None
    return {"status": "scaling"}


@router.post("/replicas/{rank}/kill", status_code=202)
async def kill_replica(rank: int, request: Request) -> AcceptedResponse:
    """Kill a replica's process."""
    state = _checked(request, rank)
    if not state.settings.allow_kill:
        raise ApiError(403, "This server kills no replicas: start it with --allow-kill.")
    if not state.engine.replicas.kill(rank):
        raise ApiError(409, f"Replica {rank} is {_state_of(state, rank)} and cannot be killed now.")
    return {"status": "killed"}


def _check_may_manage(state: ServerState) -> None:
    """Raise an ApiError if the request could come from anyone."""
    if not state.settings.may_manage:
        what = "A server that other machines can reach starts and ends replicas only for callers with its API key"
        raise ApiError(403, f"{what}: set --api-key.")


def _state_of(state: ServerState, rank: int) -> str:
    return state.engine.replicas.statuses()[rank].state


def _checked(request: Request, rank: int) -> ServerState:
    """The server's state, if it has this replica and the request may change it."""
    if not has_json(request):
        raise ApiError(415, "Content-Type must be application/json.")
    state = state_of(request)
    num_engines = state.engine.num_engines
    if not state.engine.replicas.has_replicas:
        raise ApiError(400, "This server has one engine and no replicas: start it with --data-parallel-size.")
    if not 0 <= rank < num_engines:
        raise ApiError(404, f"There is no replica {rank}: they are 0 to {num_engines - 1}.")
    return state
