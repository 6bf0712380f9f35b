"""Shrinks the pictures in stored notebooks and covers folded answers; `make notebooks` ends with it.

A figure in 256 colours looks the same and takes a quarter of the bytes, so lessons open quickly and the repository stays small.
"""

from __future__ import annotations

import base64
import io
import sys
from typing import Any


def shrink_pictures(notebook: Any) -> int:
    """Reduce a notebook's PNGs to 256 colours where that makes them smaller; return the bytes saved."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    saved = 0
    for output in outputs:
        before = output.get("data", {}).get("image/png")
        if before:
            after = base64.b64encode(shrink(base64.b64decode(before))).decode("ascii")
            if len(after) < len(before):
                output["data"]["image/png"] = after
                saved += len(before) - len(after)
    return saved


def shrink(png: bytes) -> bytes:
    """A PNG reduced to 256 colours, with transparency turned white. One that already has a palette is returned unchanged."""
    from PIL import Image

    picture = Image.open(io.BytesIO(png))
    if picture.mode == "P":
        return png
    picture = picture.convert("RGBA")
    page = Image.new("RGBA", picture.size, "white")
    page.alpha_composite(picture)
    buffer = io.BytesIO()
    page.convert("RGB").quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        buffer, "PNG", optimize=True
    )
    return buffer.getvalue()


def main(paths: list[str]) -> None:
    """Shrink the pictures in notebooks, cover their folded answers, and print the bytes saved."""
    import nbformat

    from minivllm.course.folds import cover_answers

    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        saved = shrink_pictures(notebook)
        cover_answers(notebook)
        nbformat.write(notebook, path)
        print(f"{path}: saved {saved / 1024:.0f} KiB")


if __name__ == "__main__":
    main(sys.argv[1:])
