"""Server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
"""The last event of OpenAI's streams."""


def sse(content: Any, name: str | None = None) -> bytes:
    """An event with this content as JSON, and perhaps a name."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + msgspec.json.encode(content) + b"\n\n"
