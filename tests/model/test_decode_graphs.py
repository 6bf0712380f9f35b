"""Decode steps as CUDA graphs, as far as they can be tested without a GPU: what a graph's first kernel makes of a step, and the engine over
graphs that are not captured, but computed again."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_invariants_on_a_model import tiny_folder  # noqa: F401 (a fixture)

from minivllm import LLM, SamplingParams
from minivllm.kernels import reference
from minivllm.kernels.checks import Checks
from minivllm.kernels.ops import Ops
from minivllm.worker.cuda_graphs import DecodeGraphs, StaticInputs

pytest.importorskip("triton")  # there is none for macOS
from minivllm.kernels import triton

DEVICE = torch.device("cpu" if triton.INTERPRETED else "cuda")


@pytest.mark.parametrize("kernels", [reference, triton], ids=["reference", "triton"])
@given(
    steps=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2), st.sampled_from([1, 2, 7, 1500])), min_size=1, max_size=4),
    seed=st.integers(0, 2**31),
)
def test_a_packed_step_is_spread_over_rows_and_padded(kernels, steps, seed):
    """Each step is (sequences, rows of padding, width of the tables), over what the one before has left."""
    generator = np.random.default_rng(seed)
    static = StaticInputs(max_num_seqs=8, max_blocks=1500, device=DEVICE)
    static.ops = Ops(kernels, Checks.NONE)
    tables = np.zeros((8, 1500), np.int32)
    for num_seqs, padding, width in steps:
        ids, positions, slots = generator.integers(0, 2**40, (3, num_seqs))
        lens = generator.integers(1, 2**31, num_seqs, np.int32)
        tables[:num_seqs, :width] = generator.integers(0, 2**31, (num_seqs, width), np.int32)
        starts = np.arange(num_seqs + 1, dtype=np.int32)
        arrays = [ids, positions, slots, lens, tables[:num_seqs, :width], starts]
        received = static.receive(arrays)
        assert [part.tolist() for part in received] == [array.tolist() for array in arrays]
        received[0][0] = ids[0] = 77  # as for a placeholder
        inputs = static.unpack(num_seqs + padding)
        metadata = inputs.metadata
        assert inputs.input_ids.tolist() == [*ids, *[0] * padding]
        assert inputs.positions.tolist() == [*positions, *[0] * padding]
        assert metadata.slot_mapping.tolist() == [*slots, *[-1] * padding]
        assert metadata.context_lens.tolist() == [*lens, *[0] * padding]
        assert np.array_equal(static.block_tables.cpu().numpy(), tables), "what lies beyond stays"
        assert metadata.query_start_loc.tolist() == list(range(num_seqs + padding + 1))
        assert metadata.is_decode


class Recomputed:
    """In the place of a graph: computes the step when it is replayed, into the same memory."""

    def __init__(self, graphs, size):
        self.graphs, self.size, self.count = graphs, size, 0

    def replay(self):
        self.count += 1
        computed = self.graphs._forward(self.size)
        self.graphs.outputs.setdefault(self.size, torch.empty_like(computed)).copy_(computed)


def use_graphs(llm, max_num_seqs):
    """Give the engine graphs of all sizes up to that."""
    worker = llm.llm_engine.executor.worker
    runner = worker.model_runner
    max_blocks = -(-runner.max_model_len // runner.block_size)
    graphs = DecodeGraphs(runner.model, worker.cache_engine.gpu_cache, max_num_seqs, max_blocks, worker.device)
    graphs.graphs = {size: Recomputed(graphs, size) for size in graphs.sizes}
    runner.graphs = graphs
    return graphs


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_replays_give_the_tokens_of_eager_steps(tiny_folder, async_scheduling):  # noqa: F811
    """Batches that shrink, prompts in between, and placeholders of tokens that the host does not know yet."""
    options = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 100, "block_size": 4, "max_num_seqs": 6, "device": "cpu"}
    prompts = [[5 + i] * (1 + 5 * i % 17) for i in range(11)]
    wishes = ({"temperature": 0}, {"seed": 1}, {"seed": 2, "n": 2}, {"temperature": 0, "logprobs": 2})
    params = [SamplingParams(max_tokens=3 + 2 * i % 9, ignore_eos=True, **wishes[i % 4]) for i in range(11)]
    expected = LLM(str(tiny_folder), **options).generate(prompts, params, use_tqdm=False)
    llm = LLM(str(tiny_folder), async_scheduling=async_scheduling, **options)
    graphs = use_graphs(llm, 6)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for ours, theirs in zip(outputs, expected, strict=True):
        assert [c.token_ids for c in ours.outputs] == [c.token_ids for c in theirs.outputs]
    counts = {size: graph.count for size, graph in graphs.graphs.items()}
    assert counts[6] and counts[4], counts
