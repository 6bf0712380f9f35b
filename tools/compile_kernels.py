"""Compiles all CPU kernels before anyone waits for them: runs the default model in each dtype and quantization that has kernels, and a
group of one rank."""

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
    """The collectives, then the model, in all three ways in which its layers are called."""
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
            run(llm)
            compiled = llm.llm_engine.executor.worker.compiled_model
            if compiled is not None:
                compiled.all_layers = None
                run(llm)  # each half of a layer is a call of its own, as in a tensor-parallel group
                compiled.halves = []
                run(llm)  # each operation is a call of its own, as with enforce_eager=True


def run(llm: LLM) -> None:
    """Prompts, then decode steps."""
    llm.llm_engine.block_manager.reset_prefix_cache()
    llm.generate(["Hi " * 40] * 3, SamplingParams(max_tokens=3), use_tqdm=False)


if __name__ == "__main__":
    main()
