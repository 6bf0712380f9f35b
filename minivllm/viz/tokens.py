"""Texts cut into tokens, as coloured boxes: where the cuts are, and which tokens are only part of a character."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from minivllm.viz.palette import INK, NEUTRAL, request_color, tint

_CELL, _LINE, _PAD, _WIDTH = 8.5, 24, 4, 880
"""Width of a narrow character, height of a box, space around a token's text, and width of the picture, in pixels."""
_FONT = "DejaVu Sans Mono, Menlo, Consolas, monospace"
_SIGNS = {" ": "·", "\n": "⏎", "\t": "⇥"}


class _Tokenizer(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class Piece:
    """One token in a text.

    Attributes:
        text: What it spells, or its bytes in hexadecimal if it is a part of a character.
        is_whole: Whether it spells whole characters.
    """

    text: str
    is_whole: bool


class TokenPicture:
    """A picture that a notebook shows as SVG, so that the reader's own fonts draw every script.

    Attributes:
        pieces: The tokens of each text, by its label.
    """

    def __init__(self, pieces: Mapping[str, Sequence[Piece]], lengths: Mapping[str, int]) -> None:
        self.pieces = pieces
        self._lengths = lengths

    def __repr__(self) -> str:
        return "\n".join(f"{label}: {'|'.join(piece.text for piece in pieces)}" for label, pieces in self.pieces.items())

    def _repr_svg_(self) -> str:
        rows, y = [], 6.0
        for label, pieces in self.pieces.items():
            ratio = len(pieces) / max(1, self._lengths[label])
            title = f"{label}: {self._lengths[label]} characters, {len(pieces)} tokens, {ratio:.2f} tokens per character"
            rows.append(
                f'<text x="2" y="{y + 12:.0f}" font-family="sans-serif" font-size="13" fill="{INK}">{html.escape(title)}</text>'
            )
            y += 20
            boxes, y = _boxes(pieces, y)
            rows += boxes
            y += _LINE + 14
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y:.0f}" viewBox="0 0 {_WIDTH} {y:.0f}" '
            f'role="img"><rect width="100%" height="100%" fill="white"/>{"".join(rows)}</svg>'
        )


def draw_tokens(tokenizer: _Tokenizer, texts: Mapping[str, str]) -> TokenPicture:
    """Draw the tokens of some texts. Spaces are drawn as "·"; a token that is only a part of a character shows its bytes, dashed.

    Args:
        tokenizer: With `encode` and `decode`; a byte-level one for parts of characters.
        texts: By label.
    """
    pieces = {label: _cut(tokenizer, text) for label, text in texts.items()}
    return TokenPicture(pieces, {label: len(text) for label, text in texts.items()})


def _cut(tokenizer: _Tokenizer, text: str) -> list[Piece]:
    """The tokens of a text."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    pieces: list[Piece] = []
    data, start = tokenizer.decode(token_ids, skip_special_tokens=False).encode(), 0
    hidden: list[int] = []  # tokens since the last whole character
    for token_id in token_ids:
        hidden.append(token_id)
        spelled = tokenizer.decode(hidden, skip_special_tokens=False)
        if "\ufffd" in spelled and not data[start:].startswith(spelled.encode()):
            continue
        whole = spelled.encode()
        if len(hidden) == 1:
            pieces.append(Piece(spelled, True))
        else:
            pieces += [Piece(" ".join(f"{byte:02X}" for byte in part), False) for part in _split(tokenizer, hidden, whole)]
        start += len(whole)
        hidden = []
    if hidden:
        pieces += [Piece(" ".join(f"{byte:02X}" for byte in part), False) for part in _split(tokenizer, hidden, data[start:])]
    return pieces


def _split(tokenizer: _Tokenizer, token_ids: list[int], data: bytes) -> list[bytes]:
    """The bytes of each token, which together are `data`."""
    tokens = getattr(tokenizer, "hf_tokenizer", tokenizer).convert_ids_to_tokens(token_ids)
    alphabet = byte_alphabet()
    parts = [bytes(alphabet[character] for character in token if character in alphabet) for token in tokens]
    return parts if b"".join(parts) == data else [data]


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """The character for each byte in a byte-level vocabulary: the byte itself if printable, else one from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


def _boxes(pieces: Sequence[Piece], y: float) -> tuple[list[str], float]:
    """A box for each piece, from left to right and line by line. Returns them and the last line's place."""
    boxes, x = [], 2.0
    for number, piece in enumerate(pieces):
        shown = "".join(_SIGNS.get(character, character) for character in piece.text) if piece.is_whole else piece.text
        size = 13 if piece.is_whole else 10
        width = max(1, sum(map(_cells, shown))) * _CELL * size / 13
        if x + width + 2 * _PAD > _WIDTH - 2:
            x, y = 2.0, y + _LINE + 4
        color = tint(request_color(number % 6), 0.6)
        edge = f'stroke="{NEUTRAL}"' + ("" if piece.is_whole else ' stroke-dasharray="3,2"')
        boxes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width + 2 * _PAD:.1f}" height="{_LINE}" rx="3" fill="{color}" {edge}/>'
            f'<text x="{x + _PAD:.1f}" y="{y + 16.5:.1f}" font-family="{_FONT}" font-size="{size}" fill="black" '
            f'textLength="{width:.1f}" lengthAdjust="spacingAndGlyphs" xml:space="preserve">{html.escape(shown)}</text>'
        )
        x += width + 2 * _PAD + 2
    return boxes, y


def _cells(character: str) -> float:
    """How many narrow characters wide a character is."""
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Cf"):
        return 0.0
    return 2.0 if unicodedata.east_asian_width(character) in "WF" else 1.0
