"""The last check of lesson 05: a learner's kernels in every layer of the real model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_05.launches import explained
from minivllm.course.lessons.lesson_05.rows import power_of_2
from minivllm.course.lessons.padded_steps import model_of
from minivllm.kernels import reference
from minivllm.kernels.accesses import record_accesses
from minivllm.kernels.checks import Checks
from minivllm.kernels.ops import Ops

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM

_PROMPTS = ("The capital of France is", "Once upon a time")
_NUM_TOKENS = 6
_BLOCK = 1024


class KernelOps(Ops):
    """The engine's operations, two of them by a learner's kernels; the others are the reference's.

    Args:
        add_rms_norm_kernel, silu_and_mul_kernel: As the exercise specifies them.
    """

    def __init__(self, add_rms_norm_kernel: Any, silu_and_mul_kernel: Any) -> None:
        super().__init__(reference, Checks.NONE)  # type: ignore[arg-type]
        self.add_rms_norm_kernel, self.silu_and_mul_kernel = add_rms_norm_kernel, silu_and_mul_kernel
        self.num_launches = 0

        def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
            out, total = torch.full_like(x, torch.nan), residual.clone()
            self.num_launches += 1
            self.add_rms_norm_kernel[(len(x),)](
                out, total, x.contiguous(), weight, x.shape[1], x.shape[1], eps, BLOCK=power_of_2(x.shape[1])
            )
            return out, total

        def silu_and_mul(x: Tensor) -> Tensor:
            size = x.shape[1] // 2
            out = torch.full((len(x), size), torch.nan, dtype=x.dtype, device=x.device)
            self.num_launches += 1
            self.silu_and_mul_kernel[(len(x), -(-size // _BLOCK))](out, x, size, out.stride(0), x.stride(0), BLOCK=_BLOCK)
            return out

        self.add_rms_norm, self.silu_and_mul = add_rms_norm, silu_and_mul


def write_with(add_rms_norm_kernel: Any, silu_and_mul_kernel: Any, prompts: list[str], max_tokens: int) -> tuple[list[str], int]:
    """The texts that the model writes with a learner's kernels in all layers, and how often they were launched."""
    _try_out(add_rms_norm_kernel, silu_and_mul_kernel)
    llm = _load(_is_interpreted(add_rms_norm_kernel))
    ops = _plug_in(llm, add_rms_norm_kernel, silu_and_mul_kernel)
    outputs = llm.generate(prompts, _greedy(max_tokens), use_tqdm=False)
    _check_errors(outputs)
    return [output.outputs[0].text for output in outputs], ops.num_launches


def check_engine(add_rms_norm_kernel: Any, silu_and_mul_kernel: Any) -> None:
    """The engine with a learner's kernels in every layer writes the same as with its own."""
    _try_out(add_rms_norm_kernel, silu_and_mul_kernel)
    llm = _load(_is_interpreted(add_rms_norm_kernel))
    expected = _tokens(llm)
    _plug_in(llm, add_rms_norm_kernel, silu_and_mul_kernel)
    got = _tokens(llm)
    for prompt, theirs, mine in zip(_PROMPTS, expected, got, strict=True):
        assert theirs == mine, (
            f"Your kernels in all layers of SmolLM2, {prompt!r}, greedy.\nExpected tokens: {theirs}\nGot tokens: {mine}\n"
            f"Look at add_rms_norm and silu_and_mul: the checks above test them one by one."
        )


def _try_out(add_rms_norm_kernel: Any, silu_and_mul_kernel: Any) -> None:
    """Launch each kernel once, so that an unwritten or failing one is reported before the model is loaded."""
    x, weight = torch.ones(2, 4), torch.ones(4)
    with record_accesses():
        ops = KernelOps(add_rms_norm_kernel, silu_and_mul_kernel)
        with explained("add_rms_norm", add_rms_norm_kernel):
            ops.add_rms_norm(x, x, weight, 1e-5)
        with explained("silu_and_mul", silu_and_mul_kernel):
            ops.silu_and_mul(x)


def _is_interpreted(kernel: Any) -> bool:
    return type(kernel).__name__ == "InterpretedFunction"


def _load(on_cpu: bool) -> LLM:
    from minivllm import LLM

    where = {"device": "cpu"} if on_cpu else {}
    return LLM("smollm2-135m", max_model_len=128, max_num_seqs=2, num_gpu_blocks_override=32, enforce_eager=True, **where)


def _plug_in(llm: LLM, *kernels: Any) -> KernelOps:
    """Replace the operations of all layers."""
    ops = KernelOps(*kernels)
    for module in model_of(llm).modules():
        if hasattr(module, "ops"):
            module.ops = ops
    return ops


def _greedy(max_tokens: int) -> Any:
    from minivllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def _tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(list(_PROMPTS), _greedy(_NUM_TOKENS), use_tqdm=False)
    _check_errors(outputs)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _check_errors(outputs: Any) -> None:
    error = next((output.error for output in outputs if output.error), None)
    assert error is None, f"The model ran on your kernels, and a step failed: {error}"
