"""Runs the default model once in each dtype and quantization that has CPU kernels, and a group of one rank, so that they are compiled before
anybody waits for them."""

import contextlib
import os

import torch

from minivllm import LLM, SamplingParams
from minivllm.distributed.shared_memory import create_group_memory
from minivllm.errors import ConfigError

KINDS = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"quantization": "int8"},
    {"quantization": "int8", "dtype": "bfloat16"},
)


def main() -> None:
    """Prompts, then decode steps, in all of them, and what ranks say to each other."""
    with contextlib.suppress(ImportError):  # without Numba there is nothing to compile
        from minivllm.distributed.shared_memory_group import SharedMemoryGroup

        memory = create_group_memory(1)
        group = SharedMemoryGroup(memory, 0, 1)
        group.all_reduce(torch.zeros(16, 16))
        group.all_gather(torch.zeros(16, 16))
        os.close(memory)
    for kind in KINDS:
        with contextlib.suppress(ConfigError):  # not available on this machine, as 8 bits are not everywhere
            llm = LLM("smollm2-135m", max_num_seqs=4, max_model_len=512, enable_prefix_caching=True, **kind)
            llm.generate(["Hi " * 40] * 3, SamplingParams(max_tokens=3), use_tqdm=False)


if __name__ == "__main__":
    main()
