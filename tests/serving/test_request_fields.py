"""docs/request_fields.md names exactly the fields that each endpoint's protocol has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minivllm.entrypoints.openai.chat.protocol import ChatCompletionRequest
from minivllm.entrypoints.openai.completions.protocol import CompletionRequest
from minivllm.entrypoints.openai.responses.protocol import ResponsesRequest

PAGE = Path(__file__).parents[2] / "docs" / "request_fields.md"
ROUTES = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
}
TREATMENTS = {"served", "no effect", "refused", "ignored", "–"}


def read_page() -> dict[str, dict[str, str]]:
    """Of each route: what the page says of each field."""
    [header, _, *rows] = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if "|" in line]
    assert header[1:] == list(ROUTES)
    said = [(field, cells) for names, *cells in rows for field in re.findall(r"`(\w+)`", names)]
    assert len(said) == len({field for field, _ in said}), "a field has one row"
    assert {cell for _, cells in said for cell in cells} <= TREATMENTS
    return {route: {field: cells[i] for field, cells in said} for i, route in enumerate(ROUTES)}


@pytest.mark.parametrize("route", ROUTES)
def test_the_page_of_request_fields_is_that_of_the_protocol(route):
    body, said = ROUTES[route], read_page()[route]
    served = {field for field, treatment in said.items() if treatment in ("served", "no effect")}
    assert served == set(body.model_fields)
    assert {field for field, treatment in said.items() if treatment == "refused"} == set(body.unserved) - served
