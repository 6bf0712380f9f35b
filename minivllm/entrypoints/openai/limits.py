"""Limits of a request's lists, and the words for them in errors."""

MAX_LOGPROBS = 20
"""The most candidates per token that a client may ask for, as in OpenAI's chat and vLLM."""
MAX_STOP_STRINGS = 64
MAX_STOP_TOKENS = 1024
MAX_BAD_WORDS = 1024
MAX_LOGIT_BIAS = 4096
MAX_ALLOWED_TOKENS = 16_384
MAX_CHOICES = 4096
MAX_PROMPTS = 4096
MAX_MESSAGES = 2048
MAX_PARTS = 4096
"""Per message."""
MAX_TOOLS = 128

EXPECTED = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists: "
    f"at most {MAX_PROMPTS} prompts, none of them empty",
    "input": f"a text, or a list of 1 to {MAX_MESSAGES} messages whose parts are of type input_text or output_text "
    "(tools, images and files are not supported)",
    "bad_words": f"a list of at most {MAX_BAD_WORDS} words, none of them blank",
    "tool_choice": 'none, auto, required, or {"type": "function", "function": {"name": ...}}',
    "json": "a JSON schema: an object, or its text",
    "stop": f"a string, or a list of at most {MAX_STOP_STRINGS} strings",
    "arguments": "a JSON object, or its text",
    "content": f"text, or a list of at most {MAX_PARTS} parts of type text (images, audio and files are not supported)",
}
"""What a field of several types must be, by name."""
