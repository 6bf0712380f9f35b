"""Text to tokens and back: the tokenizers and transformers libraries do the work."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import re
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm.errors import ModelLoadError, RequestError

if TYPE_CHECKING:
    import tokenizers

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

        if not self.hf_tokenizer.chat_template:
            self.hf_tokenizer.chat_template = _older_chat_template(folder)
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

    def encode(self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        """Token ids of a text, by default with the model's special tokens around it. With `split_special_tokens`, those in it are plain text.

        Raises:
            RequestError: The text is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"The text is not valid Unicode (character {error.start}): it has bytes that are not UTF-8."
            ) from None
        options = {"split_special_tokens": True} if split_special_tokens else {}
        token_ids: list[int] = self.hf_tokenizer.encode(text, add_special_tokens=add_special_tokens, **options)
        return token_ids

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        if len(token_ids) == 1 and token_ids[0] not in self.skipped_token_ids:
            return self.token_text(token_ids[0])
        return self._decode(token_ids, skip_special_tokens)

    def _decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        if self._rust is not None:
            return self._rust.decode(token_ids, skip_special_tokens=skip_special_tokens)
        text: str = self.hf_tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    @functools.cached_property
    def _rust(self) -> tokenizers.Tokenizer | None:
        """The tokenizer inside transformers' one, if that adds nothing to its `decode` but several times as much time."""
        from transformers import PreTrainedTokenizerFast

        return self.hf_tokenizer.backend_tokenizer if type(self.hf_tokenizer) is PreTrainedTokenizerFast else None

    def has(self, token_id: int) -> bool:
        """Whether an id is a token's. A model may have more rows than its tokenizer has tokens; the others have no text."""
        return self.hf_tokenizer.convert_ids_to_tokens(token_id) is not None

    def token_text(self, token_id: int) -> str:
        """The text of a single token, remembered: a step needs hundreds, or, with log-probabilities, thousands."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._decode([token_id], skip_special_tokens=False)
            if text:  # ids of no token, of which there are many, have none
                self._texts[token_id] = text
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
        escapes = Escapes(self._special_text) if self.escapes_special_tokens else None
        if escapes is not None:
            checked = escapes.escape(checked)
            options = {name: escapes.escape(value) if name == "tools" else value for name, value in options.items()}
        try:
            options = options | {"add_generation_prompt": add_generation_prompt, "tokenize": False}
            text = self.hf_tokenizer.apply_chat_template(checked, **options)
        except TemplateSyntaxError as error:
            raise ModelLoadError(
                f"The model's chat template is broken (line {error.lineno}: {error}): give another one."
            ) from error
        except Exception as error:  # a template is a program, and may object to a role or an order
            raise RequestError(f"The model's chat template rejects this conversation ({error}).") from error
        if escapes is None or not escapes.texts:
            return self.encode(text, add_special_tokens)
        parts = self._special_text.split(text)
        token_ids = [token_id for part in parts for token_id in self.encode(*escapes.unescape(part))]
        return self._with_special_tokens(token_ids) if add_special_tokens else token_ids

    @functools.cached_property
    def _special_text(self) -> re.Pattern[str]:
        """Any special token's text, in a group."""
        texts = [token.content for token in self.hf_tokenizer.added_tokens_decoder.values() if token.special and token.content]
        return re.compile(f"({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True))) or '(?!)'})")

    def _with_special_tokens(self, token_ids: list[int]) -> list[int]:
        """Token ids with those around them that `encode` adds."""
        text, around = self.encode("a", add_special_tokens=False), self.encode("a")
        begin = next(i for i in range(len(around)) if around[i : i + len(text)] == text)
        return around[:begin] + token_ids + around[begin + len(text) :]


def _older_chat_template(folder: Path) -> str | None:
    """The template in chat_template.json, a file of older models that transformers reads for processors alone; None without it.

    Raises:
        ModelLoadError: The file is damaged.
    """
    file = folder / "chat_template.json"
    if not file.exists():
        return None
    with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
        template = json.loads(file.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(template, str):
            return template
    raise ModelLoadError(f"{file} has no 'chat_template' that is a text: correct or remove it.")


class Escapes:
    """Placeholders for special tokens that are written in messages, so that a chat template takes them for text and they can be told
    from its own.

    Args:
        special_text: Matches a special token's text.

    Attributes:
        texts: What placeholders stand for.
    """

    def __init__(self, special_text: re.Pattern[str]) -> None:
        self.texts: dict[str, str] = {}
        self._special_text, self._mark = special_text, secrets.token_hex(8)

    def escape(self, value: Any) -> Any:
        """A value, such as a message, in which special tokens are placeholders wherever it has text."""
        if isinstance(value, dict):
            return {self.escape(name): self.escape(item) for name, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.escape(item) for item in value]
        return self._special_text.sub(self._replace, value) if isinstance(value, str) else value

    def _replace(self, found: re.Match[str]) -> str:
        placeholder = f"\ue000{self._mark}{found[0].encode().hex()}\ue000"
        self.texts[placeholder] = found[0]
        return placeholder

    def unescape(self, text: str) -> tuple[str, bool, bool]:
        """The arguments of `Tokenizer.encode` for a part of the template's text: special tokens are text where there were placeholders."""
        whole = text
        for placeholder, special in self.texts.items():
            whole = whole.replace(placeholder, special)
        return whole, False, whole != text


@functools.cache
def _byte_alphabet() -> dict[str, int]:
    """The characters with which byte-level tokenizers write bytes."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]


@functools.cache
def _reserved_kwargs() -> frozenset[str]:
    """The parameters of transformers' `apply_chat_template`, and "messages", a template's name for the conversation."""
    from transformers import PreTrainedTokenizerBase

    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) - {"kwargs"} | {"messages"}


def check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Variables for a chat template. Raises RequestError if one of them is something else."""
    if reserved := _reserved_kwargs() & kwargs.keys():
        raise RequestError(f"chat_template_kwargs has {min(reserved)}, which is not a variable of the template.")
    return kwargs


def _checked_message(message: Any, number: int) -> dict[str, Any]:
    """A message with its content as one string, arguments of calls as objects, and reasoning under both names that templates have for it."""
    if isinstance(message, dict) and isinstance(message.get("role"), str):
        content, calls = message.get("content"), message.get("tool_calls")
        if content is None and calls:
            content = ""
        if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            content = "\n".join(part["text"] for part in content)
        if isinstance(content, str):
            checked: dict[str, Any] = message | {"content": content}
            if calls:
                checked["tool_calls"] = _checked_calls(calls, number)
            if reasoning := message.get("reasoning") or message.get("reasoning_content"):
                checked |= {"reasoning": reasoning, "reasoning_content": reasoning}
            return checked
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
    """The arguments of an earlier call as an object: clients send it, its JSON, that JSON encoded again, or nothing.

    Raises:
        ValueError: They are something else, or cut off. The message says what they must be.
    """
    value = arguments
    with contextlib.suppress(ValueError, RecursionError):
        while isinstance(value, str) and value.strip():
            value = json.loads(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if isinstance(value, dict):
        return value
    shown = repr(arguments)
    raise ValueError(f"must be a JSON object or its text, not {shown if len(shown) <= 80 else shown[:77] + '...'}")
