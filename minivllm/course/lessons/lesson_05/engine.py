"""The last check of lesson 05: a learner's kernels in every layer of the real model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minivllm.course.lessons.lesson_05.launches import explained
from minivllm.course.lessons.lesson_05.rows import ceil_div, check_add_rms_norm, check_silu_and_mul
from minivllm.course.lessons.padded_steps import model_of
from minivllm.course.lessons.paged_kernels import power_of_2
from minivllm.course.observations import fail, is_recording, require
from minivllm.kernels import reference
from minivllm.kernels.accesses import record_accesses
from minivllm.kernels.checks import Checks
from minivllm.kernels.ops import Ops

if TYPE_CHECKING:
    from minivllm.entrypoints.llm import LLM

_PROMPTS = ["The capital of France is", "Once upon a time"]
_BLOCK = 1024


class KernelOps(Ops):
    """The engine's operations, two of them by a learner's kernels; the others are the reference's.

    Args:
        add_rms_norm_kernel, silu_and_mul_kernel: As the exercise specifies them.
    """

    def __init__(self, add_rms_norm_kernel: Any, silu_and_mul_kernel: Any) -> None:
        super().__init__(reference, Checks.NONE)  # type: ignore[arg-type]
        self.num_launches = 0

        def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
            out, total, size = torch.full_like(x, torch.nan), residual.clone(), x.shape[1]
            self.num_launches += 1
            add_rms_norm_kernel[(len(x),)](out, total, x.contiguous(), weight, size, size, eps, BLOCK=power_of_2(size))
            return out, total

        def silu_and_mul(x: Tensor) -> Tensor:
            size = x.shape[1] // 2
            out = torch.full((len(x), size), torch.nan, dtype=x.dtype, device=x.device)
            self.num_launches += 1
            silu_and_mul_kernel[(len(x), ceil_div(size, _BLOCK))](out, x, size, out.stride(0), x.stride(0), BLOCK=_BLOCK)
            return out

        self.add_rms_norm, self.silu_and_mul = add_rms_norm, silu_and_mul


def write_with(add_rms_norm_kernel: Any, silu_and_mul_kernel: Any, prompts: list[str], max_tokens: int) -> tuple[list[str], int]:
    """The texts that the model writes with a learner's kernels in all layers, and how often they were launched."""
    llm = _load(add_rms_norm_kernel, silu_and_mul_kernel)
    ops = _plug_in(llm, add_rms_norm_kernel, silu_and_mul_kernel)
    return [output.text for output in _generate(llm, prompts, max_tokens)], ops.num_launches


def check_engine(add_rms_norm_kernel: Any, silu_and_mul_kernel: Any) -> None:
    """The engine with a learner's kernels in every layer writes the same as with its own; for the grader, the kernels alone."""
    if is_recording():
        check_add_rms_norm(add_rms_norm_kernel)
        check_silu_and_mul(silu_and_mul_kernel)
        return
    llm = _load(add_rms_norm_kernel, silu_and_mul_kernel)
    expected = _generate(llm, _PROMPTS, 6)
    _plug_in(llm, add_rms_norm_kernel, silu_and_mul_kernel)
    for prompt, right, output in zip(_PROMPTS, expected, _generate(llm, _PROMPTS, 6), strict=True):
        theirs, mine = list(right.token_ids), list(output.token_ids)
        said = f"Your kernels in all layers of SmolLM2, {prompt!r}, greedy.\nExpected tokens: {theirs}\nGot tokens: {mine}"
        require(theirs, mine, f"{said}\nLook at add_rms_norm and silu_and_mul: the checks above test them one by one.")


def _load(add_rms_norm_kernel: Any, silu_and_mul_kernel: Any) -> LLM:
    """A model, after each kernel was launched once, so that an unwritten or failing one is reported before that."""
    from minivllm import LLM

    x, weight = torch.ones(2, 4), torch.ones(4)
    ops = KernelOps(add_rms_norm_kernel, silu_and_mul_kernel)
    with record_accesses():
        with explained("add_rms_norm", add_rms_norm_kernel):
            ops.add_rms_norm(x, x, weight, 1e-5)
        with explained("silu_and_mul", silu_and_mul_kernel):
            ops.silu_and_mul(x)
    where = {"device": "cpu"} if type(add_rms_norm_kernel).__name__ == "InterpretedFunction" else {}
    return LLM("smollm2-135m", max_model_len=128, max_num_seqs=2, num_gpu_blocks_override=32, enforce_eager=True, **where)


def _plug_in(llm: LLM, *kernels: Any) -> KernelOps:
    """Replace the operations of all layers."""
    ops = KernelOps(*kernels)
    for module in model_of(llm).modules():
        if hasattr(module, "ops"):
            module.ops = ops
    return ops


def _generate(llm: LLM, prompts: list[str], max_tokens: int) -> list[Any]:
    """The greedy completions."""
    from minivllm import SamplingParams

    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True), use_tqdm=False)
    for error in (output.error for output in outputs if output.error):
        fail(f"The model ran on your kernels, and a step failed: {error}")
    return [output.outputs[0] for output in outputs]
