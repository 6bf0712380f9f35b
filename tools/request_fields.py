"""Write docs/request_fields.md: what the server does with each field that a request can have in vLLM 0.32.0.

python tools/request_fields.py
"""

from __future__ import annotations

from pathlib import Path

from minivllm.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, SamplingBody
from minivllm.entrypoints.openai.responses.protocol import ResponsesRequest

PAGE = Path(__file__).parent.parent / "docs" / "request_fields.md"
BODIES: dict[str, type[SamplingBody]] = {
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
    "responses": ResponsesRequest,
}
SHARED = [
    "model",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "n",
    "presence_penalty",
    "response_format",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "user",
    "use_beam_search",
    "top_k",
    "min_p",
    "repetition_penalty",
    "watermarking",
    "length_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "truncation_side",
    "prompt_logprobs",
    "logprob_token_ids",
    "allowed_token_ids",
    "bad_words",
    "echo",
    "add_special_tokens",
    "structured_outputs",
    "priority",
    "request_id",
    "session_id",
    "return_tokens_as_token_ids",
    "return_token_ids",
    "routed_experts_prompt_start",
    "return_token_offsets",
    "mm_payload",
    "return_mm_kwargs",
    "cache_salt",
    "kv_transfer_params",
    "ec_transfer_params",
    "vllm_xargs",
    "repetition_detection",
    "thinking_token_budget",
    "stream_interval",
]
VLLM_FIELDS = {
    "chat": [
        *SHARED,
        *[
            "messages",
            "top_logprobs",
            "max_completion_tokens",
            "tools",
            "tool_choice",
            "reasoning_effort",
            "include_reasoning",
            "parallel_tool_calls",
            "add_generation_prompt",
            "continue_final_message",
            "documents",
            "chat_template",
            "chat_template_kwargs",
            "media_io_kwargs",
            "mm_processor_kwargs",
            "return_prompt_text",
        ],
    ],
    "completions": [*SHARED, "prompt", "suffix", "prompt_embeds"],
    "responses": [
        "background",
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "max_tool_calls",
        "metadata",
        "model",
        "logit_bias",
        "parallel_tool_calls",
        "previous_response_id",
        "prompt",
        "reasoning",
        "include_reasoning",
        "service_tier",
        "store",
        "stream",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "top_k",
        "min_p",
        "truncation",
        "user",
        "skip_special_tokens",
        "include_stop_str_in_output",
        "presence_penalty",
        "frequency_penalty",
        "prompt_cache_key",
        "watermarking",
        "request_id",
        "session_id",
        "media_io_kwargs",
        "mm_processor_kwargs",
        "priority",
        "mm_payload",
        "return_mm_kwargs",
        "cache_salt",
        "enable_response_messages",
        "previous_input_messages",
        "structured_outputs",
        "repetition_penalty",
        "seed",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "vllm_xargs",
        "kv_transfer_params",
        "ec_transfer_params",
        "chat_template_kwargs",
    ],
}
"""The fields of vLLM's `ChatCompletionRequest`, `CompletionRequest` and `ResponsesRequest`."""
OPENAI_FIELDS = {
    "chat": [
        "audio",
        "function_call",
        "functions",
        "metadata",
        "modalities",
        "prediction",
        "service_tier",
        "store",
        "verbosity",
        "web_search_options",
    ],
    "completions": ["best_of"],
    "responses": [
        "context_management",
        "conversation",
        "image",
        "moderation",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "stream_options",
    ],
}
"""Those of OpenAI that vLLM has not."""


def treatment(body: type[SamplingBody], field: str) -> str:
    """What the server does with a field."""
    if field in body.model_fields:
        return "served"
    return "refused" if field in body.unserved else "ignored"


WITHOUT_EFFECT = {"responses": ("tool_choice", "parallel_tool_calls")}
"""Fields that are checked, and change nothing."""


def write_page() -> str:
    """The page."""
    known = {route: {*VLLM_FIELDS[route], *OPENAI_FIELDS[route]} for route in BODIES}
    lines = [
        "# Fields of a request",
        "",
        "What `minivllm serve` does with the fields that vLLM 0.32.0 and OpenAI know. *Served*: it does what it says. *Refused*: status 400 and a sentence, unless the value would change",
        "nothing, such as null. *No effect*: checked, but there is nothing for it to change. *Ignored*: no effect; the request's line in the log names it, as it does any field that nobody",
        "knows. –: the route does not know it, in vLLM and OpenAI either, and ignores it, too. This page is made by",
        "[tools/request_fields.py](../tools/request_fields.py) from the code.",
        "",
        "| field | /v1/chat/completions | /v1/completions | /v1/responses |",
        "| --- | --- | --- | --- |",
    ]
    for field in sorted(set().union(*known.values())):
        cells = []
        for route, body in BODIES.items():
            treated = "no effect" if field in WITHOUT_EFFECT.get(route, ()) else treatment(body, field)
            cells.append("–" if treated == "ignored" and field not in known[route] else treated)
        lines.append(f"| `{field}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")
