"""Runs the default model once in each dtype and quantization that has CPU kernels, so that they are compiled before anybody waits for them."""

import contextlib

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError

KINDS = (
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "float16"},
    {"quantization": "int8"},
    {"quantization": "int8", "dtype": "bfloat16"},
)


def main() -> None:
    """Prompts, then decode steps, in all of them."""
    for kind in KINDS:
        with contextlib.suppress(ConfigError):  # not available on this machine, as 8 bits are not everywhere
            llm = LLM("smollm2-135m", max_num_seqs=4, max_model_len=512, enable_prefix_caching=True, **kind)
            llm.generate(["Hi " * 40] * 3, SamplingParams(max_tokens=3), use_tqdm=False)


if __name__ == "__main__":
    main()
