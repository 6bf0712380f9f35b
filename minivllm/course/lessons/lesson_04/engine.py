"""Runs a learner's class in the engine: it must decide and write the same as the package's own class."""

from __future__ import annotations

import random
from typing import Any


def check_block_manager(manager_class: type) -> None:
    """The same tables, copies and swaps as with the package's manager in every step of crowded simulated runs."""
    from minivllm.core.block_space_manager import BlockSpaceManager

    for seed, mode in enumerate(("recompute", "swap", "swap")):
        wanted, got = (_run_simulated(cls, seed, mode) for cls in (BlockSpaceManager, manager_class))
        for number, (theirs, ours) in enumerate(zip(wanted, got, strict=False)):
            for what, value in theirs.items():
                assert ours[what] == value, (
                    f"In step {number} of a simulated run (preemption by {mode}) {_difference(what, value, ours[what])}"
                )
        assert len(got) == len(wanted), (
            f"The simulated run takes {len(wanted)} steps with the package's manager, but {len(got)} with yours."
        )


def _difference(what: str, wanted: Any, got: Any) -> str:
    """Describe a difference from the package's manager; for tables, only the first one that differs."""
    if isinstance(wanted, dict):
        name = next(name for name in [*wanted, *got] if wanted.get(name) != got.get(name))
        what, wanted, got = f"{what} of sequence {name}", wanted.get(name), got.get(name)
    return f"{what} should be {wanted}, as with the package's manager, but is {got} with yours."


def check_text(**parts: type) -> None:
    """The real model writes the same text with a learner's classes as with the package's own.

    Samples of one prompt share blocks, and the cache is too small for all requests at once.

    Args:
        **parts: Arguments for `LLM`, such as `block_space_manager_cls` and `scheduler_cls`.
    """
    wanted, got = _write(), _write(**parts)
    for theirs, ours in zip(wanted, got, strict=True):
        assert ours == theirs, f"The real model should write {theirs!r}, but wrote {ours!r}: it has read the wrong blocks."


def _run_simulated(manager_class: type, seed: int, mode: str) -> list[dict[str, Any]]:
    """What the manager did in each step of a crowded run."""
    from minivllm.bench.simulation import make_simulated_engine
    from minivllm.sampling_params import SamplingParams

    rng = random.Random(seed)
    engine = make_simulated_engine(
        block_space_manager_cls=manager_class,
        block_size=4,
        num_gpu_blocks=28,
        num_cpu_blocks=16,
        max_num_seqs=6,
        preemption_mode=mode,
    )
    for i in range(14):
        params = SamplingParams(n=rng.choice([1, 1, 2, 3]), max_tokens=rng.randrange(2, 24), ignore_eos=True, seed=i)
        engine.add_request(f"{i}", [1 + i] * rng.randrange(1, 20), params)
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
        assert steps < 2000, "A simulated run does not finish. Are blocks lost?"
    manager = engine.block_manager
    total = (manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks())
    assert total == (28, 16), (
        f"When all requests are finished, all 28 device blocks and all 16 host blocks must be free, but {total[0]} and {total[1]} are."
    )
    assert engine.trace is not None
    return [
        {
            "the block table": {f"{key.request_id}/{key.index}": list(table) for key, table in step.block_tables.items()},
            "the blocks to copy": [tuple(pair) for pair in step.blocks_to_copy],
            "the blocks to swap out": [tuple(pair) for pair in step.blocks_to_swap_out],
            "the blocks to swap in": [tuple(pair) for pair in step.blocks_to_swap_in],
            "the number of free blocks": step.num_free_blocks,
        }
        for step in engine.trace
    ]


def _write(**parts: type) -> list[str]:
    """Generate texts with the real model; samples share blocks, and the cache is too small for all."""
    from minivllm import LLM, SamplingParams

    llm = LLM("smollm2-135m", num_gpu_blocks_override=12, max_model_len=128, max_num_seqs=4, **parts)
    prompts = [
        "The old man had three wishes, and he thought about them for a long time, because he knew that the first one was",
        "Once upon a time, in a house by the sea,",
        "1, 2, 3, 4,",
    ]
    params = [SamplingParams(n=n, temperature=0.8, seed=4, max_tokens=36, ignore_eos=True) for n in (3, 1, 1)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [completion.text for output in outputs for completion in output.outputs]
