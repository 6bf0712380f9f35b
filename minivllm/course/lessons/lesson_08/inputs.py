"""The checks of lesson 08 for a runner: a step as flat tensors, and one token for each sequence that needs one."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from minivllm.course.lessons.lesson_08.situations import describe, make_sequences
from minivllm.course.observations import expect, fail, require, rounds, show
from minivllm.scheduler_output import SequenceData
from minivllm.worker.model_input import ModelInput
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.sampler import SampledToken

_ROUNDS = 80
_WIDTH = 3
"""Numbers in a hidden state of `EchoModel`."""


# -- arrays ----------------------------------------------------------------------------------------------------------


def make_counts(rng: random.Random, longest: int = 12) -> tuple[list[int], list[int]]:
    """The tokens already computed, and those to compute now, for each sequence."""
    num_seqs = rng.randint(1, 6)
    starts = [rng.choice((0, rng.randint(1, 40))) for _ in range(num_seqs)]
    counts = [1 if rng.random() < 0.4 else rng.randint(1, longest) for _ in range(num_seqs)]
    return starts, counts


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


def _refuse_loops(name: str, few: Callable[[], Any], many: Callable[[], Any]) -> None:
    """Raise an AssertionError if a function takes more Python instructions for 3,000 tokens than for 30."""
    small, large = count_instructions(few), count_instructions(many)
    if large > small + 200:
        fail(
            f"For three sequences with 30 tokens {name} executed {small:,} instructions of Python, for three with 3,000 tokens {large:,}: "
            f"it goes over the tokens one by one.\nLook at NumPy's functions for whole arrays: cumsum, repeat, arange, and an array as the index of another."
        )


def _as_ints(said: str, what: str, array: Any) -> list[Any]:
    """An array of whole numbers as a list."""
    if not isinstance(array, np.ndarray):
        fail(f"{said}\nExpected {what}: a NumPy array\nGot {what}: {array!r}")
    if not np.issubdtype(array.dtype, np.integer):
        fail(f"{said}\nExpected {what}: whole numbers\nGot {what}: an array of {array.dtype}")
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
    few, many = ((np.array([0, 3, 7]), np.array([n, n, n])) for n in (10, 1000))
    _refuse_loops("lay_out", lambda: lay_out(*few), lambda: lay_out(*many))


def make_slot_case(rng: random.Random) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Positions, owners, padded block tables, and the block size."""
    block_size = rng.choice((1, 2, 4, 16))
    starts, counts = make_counts(rng)
    laid_out = lay_out_tokens(starts, counts)
    width = max(-(-(start + count) // block_size) for start, count in zip(starts, counts, strict=True)) + rng.randint(0, 1)
    blocks = rng.sample(range(20_000), len(starts) * width)
    tables = np.array(blocks).reshape(len(starts), width)
    return np.array(laid_out["positions"]), np.array(laid_out["owners"]), tables, block_size


def slots_of(positions: np.ndarray, owners: np.ndarray, tables: np.ndarray, block_size: int) -> list[int]:
    """What `find_slots` should return, one token at a time."""
    return [
        int(tables[owner][p // block_size]) * block_size + p % block_size
        for p, owner in zip(positions.tolist(), owners.tolist(), strict=True)
    ]


def check_find_slots(find_slots: Any) -> None:
    """Each new token has a slot: in its own sequence's block, at its own offset."""
    small = np.array([0, 1, 5]), np.array([0, 0, 1]), np.array([[7, 2], [4, 9]]), 4
    for positions, owners, tables, block_size in (small, *map(make_slot_case, rounds("slots", _ROUNDS))):
        said = f"find_slots(positions={positions.tolist()}, owners={owners.tolist()}, block_tables={tables.tolist()}, block_size={block_size})"
        got = _as_ints(said, "slots", find_slots(positions.copy(), owners.copy(), tables.copy(), block_size))
        look = "which row of block_tables (the owner's), which block in it (position // block_size), and which slot in the block (position % block_size)"
        expect(said, "slots", slots_of(positions, owners, tables, block_size), got, look)
    tables = np.arange(3 * 250).reshape(3, 250)
    few, many = ((np.tile(np.arange(n), 3), np.repeat(np.arange(3), n), tables, 4) for n in (10, 1000))
    _refuse_loops("find_slots", lambda: find_slots(*few), lambda: find_slots(*many))


# -- tensors ---------------------------------------------------------------------------------------------------------


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
        hidden = torch.zeros(len(input_ids), _WIDTH)
        hidden[:, 0], hidden[:, 1], hidden[:, 2] = input_ids, positions, metadata.slot_mapping
        return hidden

    forward = __call__

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """A row of 50 logits for each row of `hidden`."""
        self.num_rows.append(len(hidden))
        return torch.nn.functional.one_hot(next_tokens(hidden[:, 0], hidden[:, 1], hidden[:, 2]), 50).float()


def next_tokens(token_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The token that `EchoModel` puts after another."""
    return (token_ids * 7 + positions * 3 + slots).long() % 50


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


_TENSORS = {
    "input_ids": "the token_ids of all sequences, one sequence after another",
    "positions": "lay_out, and its arguments: num_computed_tokens and num_tokens of each sequence",
    "query_start_loc": "the first array of lay_out",
    "context_lens": "how many tokens each sequence has in the cache after this step: the ones computed before, plus this step's",
    "block_tables": "the block table of each sequence, filled up with 0 to the length of the longest",
    "slot_mapping": "find_slots",
}


def observations_of(inputs: Any) -> dict[str, Any]:
    """The parts of a ModelInput by name: dtype and numbers of each tensor."""
    metadata = inputs.metadata
    found: dict[str, Any] = {}
    for name in _TENSORS:
        tensor = getattr(inputs if name in ("input_ids", "positions") else metadata, name)
        found[name] = (str(tensor.dtype), tensor.tolist()) if isinstance(tensor, torch.Tensor) else ("no tensor", tensor)
    found["is_decode"] = bool(metadata.is_decode)
    found["sampled_rows"] = [int(row) for row in inputs.sampled_rows]
    return found


def check_prepare_inputs(cls: Any) -> None:
    """A step as the model takes it."""
    looks = _TENSORS | {
        "is_decode": "whether every sequence of the step has exactly one new token",
        "sampled_rows": "the row of the last token of each sequence whose num_samples is not 0",
    }
    runners: dict[int, Any] = {}
    for rng in rounds("inputs", _ROUNDS):
        block_size = rng.choice((1, 2, 4, 16))
        sequences = make_sequences(rng, block_size)
        is_first = block_size not in runners
        said = describe(sequences, block_size) + ("" if is_first else "\nThe same runner has prepared other steps before.")
        wanted, tables = observations_of(package_inputs(sequences, block_size)), [list(seq.block_table) for seq in sequences]
        got = runners.setdefault(block_size, make_runner(cls, block_size)).prepare_inputs(sequences)
        if not isinstance(got, ModelInput):
            fail(f"{said}\nExpected: a ModelInput\nGot: {got!r}")
        mine = observations_of(got)
        for name, expected in wanted.items():
            if isinstance(expected, tuple):
                expect(said, f"{name}, its numbers", expected[1], mine[name][1], looks[name])
                expect(said, f"{name}, its dtype", expected[0], mine[name][0], "the dtype passed to self.tensor")
            else:
                expect(said, name, expected, mine[name], looks[name])
        expect(
            said,
            "block tables of the sequences afterwards",
            tables,
            [seq.block_table for seq in sequences],
            "what changes seq.block_table: make a new list",
        )


def check_execute_model(cls: Any) -> None:
    """The model runs once, only the rows that matter become logits, and each token goes to its sequence."""
    for rng in rounds("execute", _ROUNDS):
        block_size = rng.choice((1, 2, 4, 16))
        sequences = make_sequences(rng, block_size)
        said, inputs = describe(sequences, block_size), package_inputs(sequences, block_size)
        runner, caches = make_runner(cls, block_size), ["the layers' caches"]
        outputs = runner.execute_model(sequences, caches)
        model, rows = runner.device.model, inputs.sampled_rows
        expect(said, "input_ids, positions and kv_caches of the model's calls", [(inputs.input_ids.tolist(), inputs.positions.tolist(), caches)], model.calls,
               "the call of self.device.model: once, with input_ids, positions, kv_caches and metadata")  # fmt: skip
        expect(said, "rows given to compute_logits", [len(rows)] if rows else [], model.num_rows,
               "compute_logits: only the sampled rows, and not at all if there are none, because for each row the model computes 49,152 numbers")  # fmt: skip
        chosen = next_tokens(inputs.input_ids, inputs.positions, inputs.metadata.slot_mapping)[rows].tolist()
        names = [f"{seq.request.request_id}, index {seq.index}" for seq in sequences if seq.num_samples]
        expect(
            said,
            "SamplingRows",
            [names] if rows else [],
            runner.sampler.rows,
            "SamplingRow(seq, seq.index), for each sequence that gets a token, in order",
        )
        tokens = iter(chosen)
        expected = [[next(tokens)] if seq.num_samples else [] for seq in sequences]
        if not isinstance(outputs, list) or not all(hasattr(output, "token_ids") for output in outputs):
            fail(f"{said}\nExpected: a list of SequenceOutput\nGot: {outputs!r}")
        expect(said, "token_ids of the outputs", expected, [list(output.token_ids) for output in outputs],
               "which row belongs to which sequence: one output for each sequence, in order, empty where nothing is sampled")  # fmt: skip
