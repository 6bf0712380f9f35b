"""The operations as Triton kernels (Tillet et al., 2019): compiled for the GPU, or interpreted on the CPU.

On a machine without a GPU, `ops.load_triton` imports this package with Triton's interpreter turned on, which runs a kernel
program by program in numpy: very slow, but a kernel can be read, stepped through and tested on any Linux machine. Triton
chooses when a kernel is defined, so the choice holds for the whole process.
"""

from __future__ import annotations

from minivllm.kernels.triton.cache import copy_blocks, reshape_and_cache
from minivllm.kernels.triton.decode_attention import paged_decode_attention
from minivllm.kernels.triton.inputs import unpack_inputs
from minivllm.kernels.triton.launch import INTERPRETED
from minivllm.kernels.triton.penalties import penalize
from minivllm.kernels.triton.prefill_attention import paged_prefill_attention
from minivllm.kernels.triton.rope_and_cache import norm_rope_and_cache
from minivllm.kernels.triton.rows import add_rms_norm, rms_norm, rotary_embedding, silu_and_mul
from minivllm.kernels.triton.sampling import draw, filter_thresholds, random_uniform
