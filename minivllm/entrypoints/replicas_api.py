"""Routes for whoever runs the server: which replicas there are, restart one in order, kill one to see what happens.

    GET  /replicas                  all of them, also while none is ready
    POST /replicas/{rank}/restart   it finishes what it has, others get the new requests, and another is started in its place
    POST /replicas/{rank}/kill      with --allow-kill: its process is killed, and its requests go on elsewhere

A POST needs `Content-Type: application/json`, which no page of another site can send.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.engine.core_messages import SchedulerStats
from minivllm.entrypoints.openai import responses as shapes
from minivllm.entrypoints.openai.errors import ApiError
from minivllm.entrypoints.server_state import ServerState

router = APIRouter()


def describe_replicas(engine: AsyncLLMEngine) -> list[shapes.ReplicaHealth]:
    """Each replica in order: its state, its sequences, and how often it has died."""
    process_ids, deaths = engine.replica_process_ids, engine.replica_deaths
    replicas = []
    for rank, state in engine.replica_states.items():
        load = engine.stats_by_engine.get(rank, SchedulerStats()).load
        replica = shapes.ReplicaHealth(rank=rank, state=state, process_id=process_ids.get(rank), **load._asdict())
        if rank in deaths:
            replica["deaths"] = deaths[rank]
        replicas.append(replica)
    return replicas


@router.get("/replicas", responses={200: {"model": shapes.ReplicasResponse}})
async def list_replicas(request: Request) -> Response:
    """All replicas."""
    engine = _state(request).engine
    return _json({"replicas": describe_replicas(engine), "streams_resumed": engine.num_resumed, "streams_lost": engine.num_lost})


@router.post("/replicas/{rank}/restart", responses={202: {"model": shapes.AcceptedResponse}})
async def restart_replica(rank: int, request: Request) -> Response:
    """Let a replica finish what it has, and start another in its place."""
    state = _checked(request, rank)
    if not state.settings.may_manage:
        raise ApiError(
            403, "A server that other machines can reach restarts replicas only for those who have its key: set --api-key."
        )
    if not state.engine.restart_replica(rank):
        raise ApiError(
            409, f"Replica {rank} is {state.engine.replica_states[rank]} and cannot be restarted now: try again later."
        )
    return _json({"status": "restarting"}, 202)


@router.post("/replicas/{rank}/kill", responses={202: {"model": shapes.AcceptedResponse}})
async def kill_replica(rank: int, request: Request) -> Response:
    """Kill a replica's process."""
    state = _checked(request, rank)
    if not state.settings.allow_kill:
        raise ApiError(403, "This server kills no replicas: start it with --allow-kill.")
    if not state.engine.kill_replica(rank):
        raise ApiError(409, f"Replica {rank} is {state.engine.replica_states[rank]} and cannot be killed now.")
    return _json({"status": "killed"}, 202)


def _checked(request: Request, rank: int) -> ServerState:
    """The server's state, if the request can be meant for it."""
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "Content-Type must be application/json.")
    state = _state(request)
    num_engines = state.engine.num_engines
    if num_engines == 1:
        raise ApiError(400, "This server has one engine and no replicas: start it with --data-parallel-size.")
    if not 0 <= rank < num_engines:
        raise ApiError(404, f"There is no replica {rank}: they are 0 to {num_engines - 1}.")
    return state


def _state(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    return state


def _json(body: Any, status_code: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status_code, media_type="application/json")
