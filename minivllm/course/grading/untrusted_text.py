"""Makes text from learners safe for a web page, a spreadsheet or a terminal."""

from __future__ import annotations

import re

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def without_colours(text: str) -> str:
    """Remove terminal colour codes."""
    return _ANSI.sub("", text)


def plain(text: str) -> str:
    """Remove colour codes, and replace characters that XML and HTML cannot contain."""
    return _NOT_IN_XML.sub("\ufffd", without_colours(text))


def plain_but_coloured(text: str) -> str:
    """Replace characters that XML and HTML cannot contain, but keep colour codes."""
    return "\x1b".join(_NOT_IN_XML.sub("\ufffd", part) for part in text.split("\x1b"))


def csv_text(text: str) -> str:
    """Turn a text into one line that no spreadsheet takes for a formula."""
    text = " ".join(plain(text).split())
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
