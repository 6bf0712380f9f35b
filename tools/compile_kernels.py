"""Runs the default model in each dtype and quantization that has CPU kernels, and a group of one rank, so that all kernels are compiled
before anybody waits for them."""

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
    """What ranks say to each other, then the model, in all three ways in which its layers are called."""
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
            run(llm)  # all layers are one call
            model = llm.llm_engine.executor.worker.model_runner.model.model
            hook = model.layers[0].register_forward_pre_hook(lambda *_: None)
            run(llm)  # each half of a layer is a call of its own, as in a tensor-parallel group
            hook.remove()
            model.platform.runs_compiled_layers = False
            run(llm)  # each operation is a call of its own, as with an attention backend of one's own


def run(llm: LLM) -> None:
    """Prompts, then decode steps."""
    llm.llm_engine.block_manager.reset_prefix_cache()
    llm.generate(["Hi " * 40] * 3, SamplingParams(max_tokens=3), use_tqdm=False)


if __name__ == "__main__":
    main()
