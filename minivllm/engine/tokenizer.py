"""Text to tokens and back: the tokenizers and transformers libraries do the work."""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minivllm.errors import ModelLoadError, RequestError

REPLACEMENT = "\ufffd"
"""Decoded from bytes that are not, or not yet, a character."""


class Tokenizer:
    """A model's tokenizer.

    Args:
        folder: The model's folder.

    Raises:
        ModelLoadError: The folder has no tokenizer that can be read.
    """

    def __init__(self, folder: Path) -> None:
        try:
            if (folder / "tokenizer.json").exists():  # seconds quicker: AutoTokenizer imports the model's code first
                from transformers import PreTrainedTokenizerFast

                self.hf_tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            else:
                from transformers import AutoTokenizer

                self.hf_tokenizer = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # many kinds, depending on what is missing
            reason = str(error).strip().split("\n")[0]
            raise ModelLoadError(
                f"{folder} has no tokenizer that can be read ({reason}): add its tokenizer.json, or set "
                f"skip_tokenizer_init=True and give prompts as token ids."
            ) from error

        self.skipped_token_ids = frozenset(
            token_id for token_id, token in self.hf_tokenizer.added_tokens_decoder.items() if token.special
        )
        """What `skip_special_tokens` leaves out."""
        self._texts: dict[int, str] = {}
        self.escapes_special_tokens = False
        """Whether special tokens that are written in a message are plain text there, so that nobody can forge a turn of the conversation."""

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text, if the tokenizer names one."""
        token_id: int | None = self.hf_tokenizer.eos_token_id
        return token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, by default with the model's special tokens around it.

        Raises:
            RequestError: The text is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"The text is not valid Unicode (character {error.start}): it has bytes that are not UTF-8."
            ) from None
        token_ids: list[int] = self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return token_ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        text: str = self.hf_tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def has(self, token_id: int) -> bool:
        """Whether an id is a token's. A model may have more rows than its tokenizer has tokens; the others have no text."""
        return self.hf_tokenizer.convert_ids_to_tokens(token_id) is not None

    def token_text(self, token_id: int) -> str:
        """The text of a single token, remembered: log-probabilities need thousands in a step."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, which may be a part of a character."""
        text = self.token_text(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        token: str = self.hf_tokenizer.convert_ids_to_tokens(token_id)
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):  # SentencePiece's
            return bytes.fromhex(byte[1])
        alphabet = _byte_alphabet()
        return bytes(alphabet[character] for character in token) if alphabet.keys() >= set(token) else text.encode()

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        *,
        add_special_tokens: bool = False,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation in the model's chat template.

        Args:
            messages: Dicts with "role" and "content", a string or a list of {"type": "text", "text": ...}. Arguments of calls in
                "tool_calls" may be objects or their JSON.
            add_generation_prompt: End with the opening of the assistant's turn.
            add_special_tokens: Put the tokenizer's special tokens around it; most templates have them already.
            options: Further ones of transformers' method, such as `tools` and `continue_final_message`, and variables of the template.

        Raises:
            RequestError: The messages are malformed, or the model has no chat template.
            ModelLoadError: Its chat template is broken.
        """
        from jinja2 import TemplateSyntaxError

        if not self.hf_tokenizer.chat_template:
            raise RequestError("This model has no chat template: give it a plain prompt.")
        if not isinstance(messages, (list, tuple)) or not messages:
            raise RequestError("A conversation must be a list with at least one message.")
        checked = [_checked_message(message, number) for number, message in enumerate(messages)]
        escaped: dict[str, str] = {}
        if self.escapes_special_tokens:
            checked = [
                message | self._escape({**message, "role": ""}, escaped) | {"role": message["role"]} for message in checked
            ]
        try:
            options = options | {"add_generation_prompt": add_generation_prompt, "tokenize": False}
            text = self.hf_tokenizer.apply_chat_template(checked, **options)
        except TemplateSyntaxError as error:
            raise ModelLoadError(
                f"The model's chat template is broken (line {error.lineno}: {error}): give another one."
            ) from error
        except Exception as error:  # a template is a program, and may object to a role or an order
            raise RequestError(f"The model's chat template rejects this conversation ({error}).") from error
        if not escaped:
            return self.encode(text, add_special_tokens)
        parts = re.split("(" + "|".join(map(re.escape, escaped)) + ")", text)
        return [token_id for part in parts for token_id in self._encode_part(escaped.get(part, part), part in escaped)]

    def _escape(self, value: Any, escaped: dict[str, str]) -> Any:
        """A message's content with a placeholder for each text that has a special token. `escaped` gets these texts by placeholder."""
        if isinstance(value, dict):
            return {name: self._escape(item, escaped) for name, item in value.items()}
        if isinstance(value, list):
            return [self._escape(item, escaped) for item in value]
        if not isinstance(value, str) or not any(token in value for token in self._special_texts()):
            return value
        placeholder = f"\ue000{secrets.token_hex(8)}\ue000"
        escaped[placeholder] = value
        return placeholder

    def _special_texts(self) -> list[str]:
        return [token.content for token in self.hf_tokenizer.added_tokens_decoder.values() if token.special]

    def _encode_part(self, text: str, is_escaped: bool) -> list[int]:
        if not is_escaped:
            return self.encode(text, add_special_tokens=False)
        token_ids: list[int] = self.hf_tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return token_ids


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The characters with which byte-level tokenizers write bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]


def _checked_message(message: Any, number: int) -> dict[str, Any]:
    """A message with its content as one string, and arguments of calls as objects."""
    if isinstance(message, dict) and isinstance(message.get("role"), str):
        content, calls = message.get("content"), message.get("tool_calls")
        if content is None and calls:
            content = ""
        if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            content = "\n".join(part["text"] for part in content)
        if isinstance(content, str):
            return message | {"content": content} | ({"tool_calls": _checked_calls(calls, number)} if calls else {})
    raise RequestError(f"A message must be a dict with 'role' and 'content', both text, not {message!r}.")


def _checked_calls(calls: Any, number: int) -> list[dict[str, Any]]:
    checked = []
    for i, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"messages[{number}].tool_calls[{i}] must be a dict with a function and its name, not {call!r}.")
        try:
            arguments = read_arguments(function.get("arguments"))
        except ValueError as error:
            raise RequestError(f"messages[{number}].tool_calls[{i}].function.arguments {error}.") from None
        checked.append(call | {"function": function | {"arguments": arguments}})
    return checked


def read_arguments(arguments: Any) -> dict[str, Any]:
    """The arguments of an earlier call as an object: clients send it, its JSON, that JSON encoded once more, or nothing.

    Raises:
        ValueError: They are something else, or cut off. The message says what they must be.
    """
    value = arguments
    for _ in range(2):
        if value is None or (isinstance(value, str) and not value.strip()):
            return {}
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                break
    if isinstance(value, dict):
        return value
    shown = repr(arguments)
    raise ValueError(f"must be a JSON object or its text, not {shown if len(shown) <= 80 else shown[:77] + '...'}")
