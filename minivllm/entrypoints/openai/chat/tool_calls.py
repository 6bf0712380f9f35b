"""Tool calls in chat: the schema for a model that must call a function, and parsers that turn its text into calls.

With tool_choice "auto", the model writes calls as Hermes and Qwen do: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. If the
request names a function, a grammar makes the text its arguments; with "required", a list of `{"name": ..., "parameters": {...}}`, as in
vLLM. Mirrors `vllm/tool_parsers/hermes_tool_parser.py`.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from abc import ABC, abstractmethod
from typing import Any, TypeVar

import msgspec

from minivllm.entrypoints.openai.chat.protocol import ChatCompletionRequest, NamedToolChoice, Tool, ToolCallDelta

_Decoded = TypeVar("_Decoded")
BEGIN, END = "<tool_call>", "</tool_call>"


class ToolCallParser(ABC):
    """Splits the growing text of one answer into content and calls.

    Attributes:
        num_calls: Calls so far.
    """

    def __init__(self) -> None:
        self.num_calls = 0

    @abstractmethod
    def update(self, text: str, is_last: bool) -> tuple[str, list[ToolCallDelta]]:
        """Take more text. Returns what is new: content, and calls or parts of calls."""

    def _call(self, name: str, arguments: str) -> ToolCallDelta:
        self.num_calls += 1
        return {
            "index": self.num_calls - 1,
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }


class NoCalls(ToolCallParser):
    """Everything is content."""

    def update(self, text: str, is_last: bool) -> tuple[str, list[ToolCallDelta]]:
        """The text."""
        return text, []


class NamedCall(ToolCallParser):
    """The text is the arguments of a function."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def update(self, text: str, is_last: bool) -> tuple[str, list[ToolCallDelta]]:
        """The arguments as they come."""
        if self.num_calls == 0:
            return "", [self._call(self._name, text)]
        return "", [{"index": 0, "function": {"arguments": text}}] if text else []


class RequiredCalls(ToolCallParser):
    """The text is a list of calls, each returned when it is complete. What is left of a list that was cut short is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._text = ""
        self._position, self._begin, self._depth, self._in_string = 0, 0, 0, False
        """How far the text was read, where the latest call begins, and how many braces and whether a string are open there."""

    def update(self, text: str, is_last: bool) -> tuple[str, list[ToolCallDelta]]:
        """The calls that are complete now; the text itself if it ends without any."""
        self._text += text
        calls = [self._call(call.name, bytes(call.parameters).decode()) for call in map(_read_required, self._objects()) if call]
        return (self._text if is_last and self.num_calls == 0 else ""), calls

    def _objects(self) -> list[str]:
        """The objects of the list that have become complete."""
        found = []
        while self._position < len(self._text):
            character = self._text[self._position]
            if self._in_string:
                if character == "\\":
                    if self._position + 1 == len(self._text):
                        break
                    self._position += 1  # what is escaped ends no string
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character == "{":
                self._begin = self._position if self._depth == 0 else self._begin
                self._depth += 1
            elif character == "}":
                self._depth -= 1
                if self._depth == 0:
                    found.append(self._text[self._begin : self._position + 1])
            self._position += 1
        return found


class HermesCalls(ToolCallParser):
    """Calls in the text, each between `<tool_call>` and `</tool_call>`; the rest, except spaces around them, is content."""

    def __init__(self) -> None:
        super().__init__()
        self._rest = ""
        """Text that is, or may become, an incomplete call."""
        self._blank: str | None = ""
        """Spaces around calls, which are content only if other content follows; None once it has."""

    def update(self, text: str, is_last: bool) -> tuple[str, list[ToolCallDelta]]:
        """Content as it comes, except a possible beginning of a call; each call when it is complete."""
        self._rest += text
        content, calls = "", []
        while True:
            before, begin, inside = self._rest.partition(BEGIN)
            if not begin:
                num_held = 0 if is_last else _length_of_beginning(self._rest)
                shown = len(self._rest) - num_held
                content += self._show(self._rest[:shown])
                self._rest = self._rest[shown:]
                break
            body, end, after = _divide(inside)
            if not end and not is_last:
                content, self._rest = content + self._show(before), BEGIN + inside
                break
            call = _read_call(body)
            if call is None and BEGIN in body:  # a call that never ended, then another
                position = body.index(BEGIN)
                body, end, after = body[:position], "", body[position:] + end + after
            content += self._show(before if call else before + BEGIN + body + end)
            if call:
                calls.append(self._call(*call))
                self._blank = ""
            self._rest = after
        if is_last and self._blank and not self.num_calls:
            content += self._blank
        return content, calls

    def _show(self, text: str) -> str:
        """The content of a text outside calls."""
        if self._blank is None:
            return text
        self._blank += text
        if not self._blank.strip():
            return ""
        text, self._blank = self._blank, None
        return text


def _length_of_beginning(text: str) -> int:
    """How many characters at the end of a text may begin `<tool_call>`."""
    return next((length for length in range(len(BEGIN) - 1, 0, -1) if text.endswith(BEGIN[:length])), 0)


def _divide(text: str) -> tuple[str, str, str]:
    """A call's text, its end tag, and the rest. An end tag inside a JSON string of the call does not count."""
    position = text.find(END)
    while position >= 0 and text[:position].replace("\\\\", "").replace('\\"', "").count('"') % 2:
        position = text.find(END, position + 1)
    return (text, "", "") if position < 0 else (text[:position], END, text[position + len(END) :])


_NOTHING = msgspec.Raw(b"")


class _HermesCall(msgspec.Struct, forbid_unknown_fields=True):
    """A call as models write it; other fields than these may be arguments, so they make it content."""

    name: str
    arguments: msgspec.Raw = _NOTHING
    parameters: msgspec.Raw = _NOTHING
    """Llama's name for arguments."""
    id: str | int | None = None
    type: str | None = None


class _RequiredCall(msgspec.Struct):
    name: str
    parameters: msgspec.Raw


def _decode(text: str, kind: type[_Decoded]) -> _Decoded:
    """Decode the model's JSON. Raises ValueError if it is invalid, is not of this type, or has half a surrogate pair."""
    try:
        decoded = msgspec.json.decode(text, type=kind)
        json.dumps(json.loads(text), ensure_ascii=False).encode()  # no half characters
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return decoded


def _read_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call; None if the text is not one."""
    try:
        call = _decode(text, _HermesCall)
    except ValueError:
        return None
    fields = [_read_written(bytes(field).decode()) for field in (call.arguments, call.parameters)]
    given = [arguments for arguments in fields if arguments != "{}"]
    return (call.name, given[0] if given else "{}") if len(given) < 2 else None


def _read_written(arguments: str) -> str:
    """The arguments of a call as the model wrote them. Some models write their JSON in a string, even in one within another, or nothing."""
    text = arguments
    with contextlib.suppress(ValueError):
        while text.startswith('"'):
            text = _decode(text, str).strip()
            if text.startswith(("{", "[")):
                _decode(text, Any)
                return text
    return "{}" if text in ("", "null") else arguments


def _read_required(text: str) -> _RequiredCall | None:
    try:
        return _decode(text, _RequiredCall)
    except ValueError:
        return None


def make_parser(body: ChatCompletionRequest) -> ToolCallParser:
    """The parser for one answer to a request."""
    choice = body.tool_choice
    if not body.tools or choice == "none":
        return NoCalls()
    if isinstance(choice, NamedToolChoice):
        return NamedCall(choice.function.name)
    return RequiredCalls() if choice == "required" else HermesCalls()


def schema_of_calls(body: ChatCompletionRequest) -> dict[str, Any] | None:
    """The JSON schema of the text if a call is required, else None."""
    tools, choice = body.tools or [], body.tool_choice
    if isinstance(choice, NamedToolChoice):
        return next(_parameters(tool) for tool in tools if tool.function.name == choice.function.name)
    if choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": {"$ref": f"#/$defs/{number}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for number, tool in enumerate(tools)
    ]
    limit = {"maxItems": 1} if body.parallel_tool_calls is False else {}
    parameters = {str(number): _move_refs(_parameters(tool), f"#/$defs/{number}") for number, tool in enumerate(tools)}
    return {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **limit, "$defs": parameters}


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of a function's arguments. A plain one allows no unnamed arguments, as in vLLM."""
    schema = tool.function.parameters or {"type": "object", "properties": {}}
    if (
        schema.keys() <= {"type", "properties", "required", "title", "description", "$defs", "definitions"}
        and "properties" in schema
    ):
        return schema | {"additionalProperties": False}
    return schema


_VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are not schemas."""


def _move_refs(schema: Any, where: str) -> Any:
    """Embed a schema in another at `where`: its references to itself are rewritten."""
    if isinstance(schema, list):
        return [_move_refs(item, where) for item in schema]
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):  # relative to its $id
        return schema
    moved = {key: value if key in _VALUES else _move_refs(value, where) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = where + reference[1:]
    return moved
