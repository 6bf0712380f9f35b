"""The checks of lesson 08 for a runner: a step as flat tensors, and one token for each sequence that needs one."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from minivllm.course.lessons.lesson_08.situations import describe, expect_list, make_sequences
from minivllm.course.observations import expect, fail, require, rounds, show
from minivllm.scheduler_output import SequenceData, SequenceOutput
from minivllm.worker.model_input import ModelInput
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.sampler import SampledToken, SamplingRow

_ROUNDS = 80


def make_counts(rng: random.Random) -> tuple[list[int], list[int]]:
    """The tokens already computed, and those to compute now, for each sequence."""
    num_seqs = rng.randint(1, 6)
    starts = [rng.choice((0, rng.randint(1, 40))) for _ in range(num_seqs)]
    return starts, [1 if rng.random() < 0.4 else rng.randint(1, 12) for _ in range(num_seqs)]


def count_instructions(work: Callable[[], Any]) -> int:
    """The Python instructions that a call executes; compiled code counts as one."""
    counted, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal counted
        frame.f_trace_opcodes = True
        counted += event == "opcode"
        return trace

    sys._getframe().f_trace_opcodes = True  # without it the first call on Python 3.12 counts nothing
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return counted


def _refuse_loops(name: str, call: Callable[[int], Any]) -> None:
    """Raise an AssertionError if a call with three sequences of 1,000 tokens takes more Python instructions than one with 10."""
    small, large = (count_instructions(partial(call, num_tokens)) for num_tokens in (10, 1000))
    if large > small + 200:
        fail(
            f"For three sequences with 30 tokens {name} executed {small:,} instructions of Python, for three with 3,000 tokens {large:,}: "
            f"it goes over the tokens one by one.\nLook at NumPy's functions for whole arrays: cumsum, repeat, arange, and an array as the index of another."
        )


def _as_ints(said: str, what: str, array: Any) -> list[Any]:
    """An array of whole numbers as a list."""
    if not isinstance(array, np.ndarray) or not np.issubdtype(array.dtype, np.integer):
        fail(f"{said}\nExpected {what}: a NumPy array of whole numbers\nGot {what}: {array!r}")
    return array.tolist()


def lay_out_tokens(starts: list[int], counts: list[int]) -> dict[str, list[int]]:
    """What `lay_out` should return, one token at a time."""
    rows = [(seq, start + i) for seq, (start, count) in enumerate(zip(starts, counts, strict=True)) for i in range(count)]
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    return {"query_start_loc": ends, "owners": [seq for seq, _ in rows], "positions": [position for _, position in rows]}


def check_lay_out(lay_out: Any) -> None:
    """The tokens of a step side by side: where each sequence begins, which sequence each row belongs to, and its position in the text."""
    looks = {
        "query_start_loc": "the sums of counts, with a 0 in front",
        "owners": "np.repeat: the number of a sequence, once for each of its tokens in this step",
        "positions": "where positions begin: a sequence continues where it stopped, at its start; and its rows begin at its query_start_loc",
    }
    for rng in rounds("lay out", _ROUNDS):
        starts, counts = make_counts(rng)
        given = np.array(starts), np.array(counts)
        said = f"lay_out(starts={starts}, counts={counts})"
        got = lay_out(*given)
        if not isinstance(got, (tuple, list)) or len(got) != 3:
            fail(f"{said}\nExpected: three arrays\nGot: {show(got)}")
        for (name, expected), array in zip(lay_out_tokens(starts, counts).items(), got, strict=True):
            expect(said, name, expected, _as_ints(said, name, array), looks[name])
        require([starts, counts], [array.tolist() for array in given], f"{said}\nIt has changed its arguments.")
    _refuse_loops("lay_out", lambda n: lay_out(np.array([0, 3, 7]), np.array([n, n, n])))


def make_slot_case(rng: random.Random) -> tuple[list[int], list[int], list[list[int]], int]:
    """Positions, owners, padded block tables, and the block size."""
    block_size = rng.choice((1, 2, 4, 16))
    starts, counts = make_counts(rng)
    laid_out = lay_out_tokens(starts, counts)
    width = max(-(-(start + count) // block_size) for start, count in zip(starts, counts, strict=True)) + rng.randint(0, 1)
    tables = [rng.sample(range(i, 20_000, len(starts)), width) for i in range(len(starts))]
    return laid_out["positions"], laid_out["owners"], tables, block_size


def check_find_slots(find_slots: Any) -> None:
    """Each new token has a slot: in its own sequence's block, at its own offset."""
    look = "which row of block_tables (the owner's), which block in it (position // block_size), and which slot in the block (position % block_size)"
    small = [0, 1, 5], [0, 0, 1], [[7, 2], [4, 9]], 4
    for positions, owners, tables, size in (small, *map(make_slot_case, rounds("slots", _ROUNDS))):
        said = f"find_slots(positions={positions}, owners={owners}, block_tables={tables}, block_size={size})"
        expected = [tables[owner][p // size] * size + p % size for p, owner in zip(positions, owners, strict=True)]
        got = find_slots(np.array(positions), np.array(owners), np.array(tables), size)
        expect(said, "slots", expected, _as_ints(said, "slots", got), look)
    array = np.arange(3 * 250).reshape(3, 250)
    _refuse_loops("find_slots", lambda n: find_slots(np.tile(np.arange(n), 3), np.repeat(np.arange(3), n), array, 4))


class EchoModel:
    """A stand-in for the model: a token's hidden state encodes its input, and its logits say which token comes next."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.num_rows: list[int] = []
        self.fails = False

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, kv_caches: Any, metadata: Any) -> torch.Tensor:
        """As the model's `forward`."""
        if self.fails:
            raise RuntimeError("out of memory")
        self.calls.append((input_ids.tolist(), positions.tolist(), kv_caches))
        return torch.stack((input_ids, positions, metadata.slot_mapping), dim=1).float()

    forward = __call__

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """A row of 50 logits for each row of `hidden`."""
        self.num_rows.append(len(hidden))
        return torch.nn.functional.one_hot((hidden @ torch.tensor([7.0, 3.0, 1.0])).long() % 50, 50).float()


class EchoSampler:
    """The most likely token of each row; records which request it was for."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def sample(self, logits: torch.Tensor, rows: list[Any]) -> list[SampledToken]:
        """As `Sampler.sample`."""
        if len(logits) != len(rows):
            fail(f"The sampler was given {len(logits)} rows of logits, but {len(rows)} SamplingRows.")
        self.rows.append([f"{row.seq.request.request_id}, index {row.index}" for row in rows])
        return [SampledToken(int(token_id)) for token_id in logits.argmax(dim=1)]


def make_runner(cls: Any, block_size: int) -> Any:
    """A learner's runner on a device that has an `EchoModel`."""
    device = SimpleNamespace(model=EchoModel(), block_size=block_size, platform=SimpleNamespace(device=torch.device("cpu")))
    return cls(device, EchoSampler())


def package_inputs(sequences: list[SequenceData], block_size: int) -> ModelInput:
    """What the package's runner turns a step into."""
    return ModelRunner(None, block_size, 10_000, torch.device("cpu")).prepare_inputs(sequences, num_blocks=10_000)  # type: ignore[arg-type]


_INPUTS = {
    "input_ids": "the token_ids of all sequences, one sequence after another",
    "positions": "lay_out, and its arguments: num_computed_tokens and num_tokens of each sequence",
    "query_start_loc": "the first array of lay_out",
    "context_lens": "how many tokens each sequence has in the cache after this step: the ones computed before, plus this step's",
    "block_tables": "the block table of each sequence, filled up with 0 to the length of the longest",
    "slot_mapping": "find_slots",
    "is_decode": "whether every sequence of the step has exactly one new token",
    "sampled_rows": "the row of the last token of each sequence whose num_samples is not 0",
}
"""The parts of a ModelInput, and where to look."""


def observe_input(inputs: ModelInput, name: str) -> tuple[Any, str]:
    """A part of a ModelInput in comparable form, and its dtype, if it should be a tensor."""
    value = getattr(inputs if hasattr(inputs, name) else inputs.metadata, name)
    if name in ("is_decode", "sampled_rows"):
        return bool(value) if name == "is_decode" else [int(row) for row in value], "any"
    return (value.tolist(), str(value.dtype)) if isinstance(value, torch.Tensor) else (repr(value), "no tensor")


def check_prepare_inputs(cls: Any) -> None:
    """A step as the model takes it."""
    runners: dict[int, Any] = {}
    for rng in rounds("inputs", _ROUNDS):
        block_size = rng.choice((1, 2, 4, 16))
        sequences = make_sequences(rng, block_size)
        said = describe(sequences, block_size)
        if block_size in runners:
            said += "\nThe same runner has prepared other steps before."
        wanted, tables = package_inputs(sequences, block_size), [list(seq.block_table) for seq in sequences]
        got = runners.setdefault(block_size, make_runner(cls, block_size)).prepare_inputs(sequences)
        if not isinstance(got, ModelInput):
            fail(f"{said}\nExpected: a ModelInput\nGot: {got!r}")
        for name, look in _INPUTS.items():
            (expected, dtype), (mine, my_dtype) = observe_input(wanted, name), observe_input(got, name)
            expect(said, name, expected, mine, look)
            expect(said, f"{name}, its dtype", dtype, my_dtype, "the dtype passed to self.tensor")
        look = "what changes seq.block_table: make a new list"
        expect(said, "block tables of the sequences afterwards", tables, [seq.block_table for seq in sequences], look)


def check_execute_model(cls: Any) -> None:
    """The model runs once, only the rows that matter become logits, and each token goes to its sequence."""
    for rng in rounds("execute", _ROUNDS):
        block_size = rng.choice((1, 2, 4, 16))
        sequences, caches = make_sequences(rng, block_size), ["the layers' caches"]
        said = describe(sequences, block_size)
        model, sampler = EchoModel(), EchoSampler()
        expected = execute(model, sampler, sequences, package_inputs(sequences, block_size), caches)
        runner = make_runner(cls, block_size)
        outputs = runner.execute_model(sequences, caches)
        mine = runner.device.model
        expect(said, "input_ids, positions and kv_caches of the model's calls", model.calls, mine.calls, _RUNNER["model"])
        expect(said, "rows given to compute_logits", model.num_rows, mine.num_rows, _RUNNER["logits"])
        expect(said, "SamplingRows", sampler.rows, runner.sampler.rows, _RUNNER["sampler"])
        expect_list(said, SequenceOutput, outputs)
        expect(said, "token_ids of the outputs", expected, [list(output.token_ids) for output in outputs], _RUNNER["outputs"])


_RUNNER = {
    "model": "the call of self.device.model: once, with input_ids, positions, kv_caches and metadata",
    "logits": "compute_logits: only the sampled rows, and not at all if there are none, because for each row the model computes 49,152 numbers",
    "sampler": "SamplingRow(seq, seq.index), for each sequence that gets a token, in order",
    "outputs": "which row belongs to which sequence: one output for each sequence, in order, empty where nothing is sampled",
}


def execute(model: EchoModel, sampler: EchoSampler, sequences: list[SequenceData], inputs: ModelInput, caches: Any) -> list[Any]:
    """What `execute_model` should do: the tokens of each sequence."""
    hidden = model(inputs.input_ids, inputs.positions, caches, inputs.metadata)
    rows = [SamplingRow(seq, seq.index) for seq in sequences if seq.num_samples]
    tokens = iter(sampler.sample(model.compute_logits(hidden[inputs.sampled_rows]), rows) if rows else ())
    return [[next(tokens).token_id] if seq.num_samples else [] for seq in sequences]
