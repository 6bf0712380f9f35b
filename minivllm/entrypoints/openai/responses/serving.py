"""/v1/responses: the next message of a conversation, in the form of OpenAI's Responses API. Mirrors `vllm/entrypoints/openai/responses/serving.py`.

Requests and answers are those of /v1/chat/completions in another form. Nothing is stored: to continue a conversation, the client sends
its earlier messages again.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

from minivllm.engine.async_llm_engine import AsyncLLMEngine
from minivllm.entrypoints.openai.chat.serving import ChatAnswer
from minivllm.entrypoints.openai.errors import ApiError
from minivllm.entrypoints.openai.protocol import Json, sse
from minivllm.entrypoints.openai.responses.protocol import OutputMessage, OutputText, ResponsesRequest, ResponsesResponse

Status = Literal["in_progress", "completed", "incomplete", "failed"]
PLACE = {"output_index": 0, "content_index": 0}
"""The text's place: the only part of the only item."""


class ResponsesAnswer(ChatAnswer):
    """One message.

    Raises:
        RequestError: Parameters that do not fit together.
    """

    id_prefix = "resp_"

    def __init__(self, engine: AsyncLLMEngine, body: ResponsesRequest) -> None:
        self.responses_body = body
        self._item_id = f"msg_{uuid.uuid4().hex}"
        self._num_events = 0
        self._text = ""
        self._finish_reason: str | None = None
        super().__init__(engine, body.to_chat())

    async def response(self) -> Json:
        """Generate to the end, and return the response."""
        [choice] = (await super().response())["choices"]
        self._text, self._finish_reason = choice["message"]["content"], choice["finish_reason"]
        return dict(self._response(self._status))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Generate, and yield the server-sent events of each output."""
        async with aclosing(self._chunks()) as outputs:
            async for chunks in outputs:
                events = [] if self._num_events else self._opening_events()
                for chunk in chunks:
                    [choice] = chunk["choices"]
                    self._finish_reason = choice["finish_reason"]
                    if piece := choice["delta"].get("content"):
                        self._text += piece
                        events.append(self._text_event("response.output_text.delta", delta=piece, logprobs=[]))
                if events:
                    yield b"".join(events)

    def last_events(self) -> bytes:
        """The events after all output."""
        return b"".join(
            [
                self._text_event("response.output_text.done", text=self._text, logprobs=[]),
                self._text_event("response.content_part.done", part=self._part(self._text)),
                self._event("response.output_item.done", output_index=0, item=self._item(self._status)),
                self._event(f"response.{self._status}", response=self._response(self._status)),
            ]
        )

    def error_events(self, error: ApiError) -> bytes:
        """The event that ends a stream which has begun."""
        failed = self._response("failed")
        failed["error"] = {"code": "server_error", "message": error.message}
        failed["output"] = [self._item("incomplete")]
        return self._event("response.failed", response=failed)

    def _opening_events(self) -> list[bytes]:
        begun = self._response("in_progress")
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress")),
            self._text_event("response.content_part.added", part=self._part("")),
        ]

    def _text_event(self, kind: str, **content: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, **PLACE, **content)

    def _event(self, kind: str, **content: Any) -> bytes:
        event = sse({"type": kind, "sequence_number": self._num_events, **content}, kind)
        self._num_events += 1
        return event

    @property
    def _status(self) -> Literal["completed", "incomplete"]:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def _part(self, text: str) -> OutputText:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, status: Literal["in_progress", "completed", "incomplete"]) -> OutputMessage:
        content = [] if status == "in_progress" else [self._part(self._text)]
        return {"type": "message", "id": self._item_id, "status": status, "role": "assistant", "content": content}

    def _response(self, status: Status) -> ResponsesResponse:
        """The response so far. Only a response that has ended has output and usage."""
        body, usage, has_ended = self.responses_body, self.usage, status in ("completed", "incomplete")
        form = body.text and body.text.format
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.head["created"],
            "model": self.head["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "metadata": body.metadata,
            "output": [self._item(self._status)] if has_ended else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": self.params.temperature,
            "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_p": self.params.top_p,
            "truncation": "disabled",
            "max_output_tokens": body.max_output_tokens,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            }
            if has_ended
            else None,
        }
