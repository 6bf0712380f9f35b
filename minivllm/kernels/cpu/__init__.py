"""The operations as loops that Numba compiles for the CPU.

Attention walks the block tables instead of gathering blocks; linear layers read packed weights once; the operations around
them are one pass each. The loops read like the Triton kernels next door; what no compiler makes of loops is in `native`. Numba compiles
them at the first call for each head size and dtype, which takes seconds, and keeps the result on disk.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
from pathlib import Path

import numba
from numba.core import event
from tqdm import tqdm

from minivllm.kernels.cpu.native.cache_lock import save_one_at_a_time
from minivllm.kernels.cpu.native.features import USED

# Numba keeps compiled kernels on disk, and compiles a kernel again when its own file has changed, but not when a function that it
# calls has. So the folder is named after all sources of this package, after `reference`, whose constants they take, and after the
# instructions that they may use; the setting applies to these imports alone.
_folder = Path(__file__).parent
_files = [*sorted(_folder.rglob("*.py")), _folder.parent / "reference.py"]
_sources = b"".join(path.read_bytes() for path in _files) + repr(USED).encode()
_cache_dir_before = numba.config.CACHE_DIR
numba.config.CACHE_DIR = str(Path(_cache_dir_before or _folder / "__pycache__") / hashlib.sha256(_sources).hexdigest()[:16])

from minivllm.kernels.cpu import collectives
from minivllm.kernels.cpu.decode_attention import paged_decode_attention
from minivllm.kernels.cpu.decoder_layer import (
    AttentionWeights,
    LayerWeights,
    MLPWeights,
    attention_block,
    decoder_layers,
    mlp_block,
)
from minivllm.kernels.cpu.linear import PackedWeight, packed_linear
from minivllm.kernels.cpu.linear_bfloat16 import PackedBfloat16Weight
from minivllm.kernels.cpu.linear_int8 import PackedInt8Weight
from minivllm.kernels.cpu.native.features import HAS_BFLOAT16_AMX, HAS_BFLOAT16_DOT, HAS_INT8_AMX, HAS_INT8_DOT
from minivllm.kernels.cpu.native.panels import PANEL
from minivllm.kernels.cpu.prefill_attention import paged_prefill_attention
from minivllm.kernels.cpu.rows import (
    add_rms_norm,
    hadamard_transform,
    random_uniform,
    reshape_and_cache,
    rms_norm,
    rotary_embedding,
    silu_and_mul,
)

numba.config.CACHE_DIR = _cache_dir_before
save_one_at_a_time()


class _CompilationNotice(event.Listener):
    """Logs once that Numba is compiling some of these kernels, because that takes seconds; on a terminal, counts them."""

    def __init__(self) -> None:
        self.progress: tqdm | None = None
        self.depth = 0  # a kernel is compiled within another that calls it

    def on_start(self, event: event.Event) -> None:
        if not _is_ours(event):
            return
        if self.progress is None:
            logging.getLogger(__name__).warning("Compiling the CPU kernels for this model, once; it takes some seconds.")
            self.progress = tqdm(desc="Compiling", unit=" functions", leave=False, disable=sys.stderr is None or None)
        self.depth += 1

    def on_end(self, event: event.Event) -> None:
        if not _is_ours(event) or self.progress is None:
            return
        self.depth -= 1
        self.progress.update()
        if self.depth == 0:
            self.progress.clear()


def _is_ours(event: event.Event) -> bool:
    return (event.data["dispatcher"].py_func.__module__ or "").startswith(__name__)


@functools.cache
def give_notice_of_compilation() -> None:
    """From now on, log a line when these kernels are compiled for the first time."""
    event.register("numba:compile", _CompilationNotice())
