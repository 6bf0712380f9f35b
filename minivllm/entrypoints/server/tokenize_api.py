"""vLLM's routes /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from typing_extensions import TypedDict

from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.entrypoints.openai.answer import check_length, tokenizer_of
from minivllm.entrypoints.openai.chat.protocol import Messages, TemplateBody
from minivllm.entrypoints.openai.chat.serving import encode_chat
from minivllm.entrypoints.openai.protocol import Body, TokenId
from minivllm.entrypoints.server.json_route import JsonRoute
from minivllm.entrypoints.server.state import check_model, state_of
from minivllm.errors import RequestError

router = APIRouter(route_class=JsonRoute)


class TokenizeRequest(TemplateBody):
    """The body of POST /tokenize: a prompt, or a conversation with all that makes a prompt of it on /v1/chat/completions."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool = Field(False, description="Return tokens as strings, too.")

    @model_validator(mode="after")
    def _check_combinations(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("prompt or messages must be given, and not both.")
        return self


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class TokenizeResponse(TypedDict):
    """The response of /tokenize; `token_strs` if asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(TypedDict):
    """The response of /detokenize."""

    prompt: str


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> TokenizeResponse:
    """Tokenize a text, or a conversation with the chat template applied."""
    check_model(request, body.model)
    engine = state_of(request).engine
    tokenizer = tokenizer_of(engine).hf_tokenizer
    async with state_of(request).tokenizing.turn():
        tokens = await _encode(engine, body)
    return {
        "count": len(tokens),
        "max_model_len": engine.input_processor.max_request_tokens,
        "tokens": tokens,
        "token_strs": tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None,
    }


async def _encode(engine: AsyncLLMEngine, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        return await encode_chat(engine, body.messages, body.template_options())
    assert body.prompt is not None
    check_length(len(body.prompt), "characters", engine)
    return await asyncio.to_thread(tokenizer_of(engine).encode, body.prompt, body.add_special_tokens is not False)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeResponse:
    """Decode tokens, special ones included."""
    check_model(request, body.model)
    engine = state_of(request).engine
    check_length(len(body.tokens), "tokens", engine)
    vocab_size = engine.model_config.vocab_size
    if (largest := max(body.tokens, default=0)) >= vocab_size:
        raise RequestError(f"tokens has {largest}, but this model's ids go from 0 to {vocab_size - 1}.")
    async with state_of(request).tokenizing.turn():
        return {"prompt": await asyncio.to_thread(tokenizer_of(engine).decode, body.tokens, False)}
