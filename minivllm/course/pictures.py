"""Pictures in stored notebooks, made small: `make notebooks` ends with `python -m minivllm.course.pictures notebooks/*.ipynb`.

A figure of 256 colours looks the same and takes a quarter of the bytes, so that a lesson with many figures opens quickly, and its
history stays small.
"""

from __future__ import annotations

import base64
import io
import sys
from typing import Any


def shrink_pictures(notebook: Any) -> int:
    """Store a notebook's PNGs with 256 colours, where that makes them smaller. Returns the bytes saved."""
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
    """A PNG with at most 256 colours, on white where it was transparent. One that has a palette already stays as it is."""
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
    """Shrink the pictures of the notebooks at these paths, and say by how much."""
    import nbformat

    for path in paths:
        notebook = nbformat.read(path, as_version=4)
        saved = shrink_pictures(notebook)
        nbformat.write(notebook, path)
        print(f"{path}: pictures are {saved / 1024:.0f} KiB smaller")


if __name__ == "__main__":
    main(sys.argv[1:])
