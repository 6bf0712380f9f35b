"""Compiles all CPU kernels before anyone waits for them: runs the default model in each dtype and quantization that has kernels, in two
processes at a time, and a group of one rank."""

import contextlib
import os
import subprocess
import sys

import torch

from minivllm import LLM, SamplingParams
from minivllm.distributed.shared_memory import create_group_memory
from minivllm.errors import ConfigError
from minivllm.models.hub import resolve_model

HALVES = (
    ({"dtype": "float32"}, {"quantization": "int8"}),
    ({"dtype": "bfloat16"}, {"dtype": "float16"}, {"quantization": "int8", "dtype": "bfloat16"}),
)
"""Options of the model, for each process. They take about as long."""


def main() -> int:
    """Compile in this process and in another. Returns an exit status."""
    half = int(sys.argv[1]) if sys.argv[1:] else 0
    resolve_model("smollm2-135m")  # converted once, before both processes read it
    other = None if half else subprocess.Popen([sys.executable, __file__, "1"])
    with contextlib.suppress(ImportError):  # without Numba there is nothing to compile
        if half == 0:
            compile_collectives()
        for kind in HALVES[half]:
            with contextlib.suppress(ConfigError):  # not available on this machine, as 8 bits are not everywhere
                compile_model(kind)
    return 0 if other is None else other.wait()


def compile_collectives() -> None:
    """What ranks do together, in a group of one."""
    from minivllm.distributed.shared_memory_group import SharedMemoryGroup

    memory = create_group_memory(1)
    group = SharedMemoryGroup(memory, 0, 1)
    group.all_reduce(torch.zeros(16, 16))
    group.all_gather(torch.zeros(16, 16))
    os.close(memory)


def compile_model(kind: dict[str, str]) -> None:
    """The model in all three ways in which its layers are called."""
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
    sys.exit(main())
