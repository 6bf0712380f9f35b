"""Steps as CUDA graphs, as far as they can be tested without a GPU: what a graph's first kernel makes of a step, and the engine over
graphs that are not captured, but computed again."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_invariants_on_a_model import tiny_folder  # noqa: F401 (a fixture)

from minivllm import LLM, SamplingParams
from minivllm.kernels import reference
from minivllm.kernels.checks import Checks
from minivllm.kernels.ops import Ops
from minivllm.models.llama import LlamaForCausalLM
from minivllm.worker import cuda_graphs
from minivllm.worker.cuda_graphs import GraphSize, StaticInputs, StepGraphs, has_own_head
from minivllm.worker.sampler import Sampler

pytest.importorskip("triton")  # there is none for macOS
from minivllm.kernels import triton

DEVICE = torch.device("cpu" if triton.INTERPRETED else "cuda")


@pytest.mark.parametrize("kernels", [reference, triton], ids=["reference", "triton"])
@settings(max_examples=12)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(1, 5), min_size=1, max_size=6),
            st.integers(0, 4),
            st.sampled_from([1, 2, 7, 1500]),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**31),
)
def test_a_packed_step_is_spread_over_rows_and_padded(kernels, steps, seed):
    """Each step is (tokens of its sequences, rows of padding, width of the tables, whether it decodes), over what the one before has left."""
    generator = np.random.default_rng(seed)
    static = StaticInputs(max_tokens=40, max_num_seqs=10, max_blocks=1500, device=DEVICE)
    static.ops = Ops(kernels, Checks.NONE)
    tables = np.zeros((10, 1500), np.int32)
    for counts, padding, width, is_decode in steps:
        counts = [1] * len(counts) if is_decode else counts
        num_tokens, num_seqs = sum(counts), len(counts)
        ids, positions, slots = generator.integers(0, 2**40, (3, num_tokens))
        lens = generator.integers(1, 2**31, num_seqs, np.int32)
        tables[:num_seqs, :width] = generator.integers(0, 2**31, (num_seqs, width), np.int32)
        starts = np.cumsum([0, *counts], dtype=np.int32)
        arrays = [ids, positions, slots, lens, tables[:num_seqs, :width], starts]
        received = static.receive(arrays)
        assert [part.tolist() for part in received] == [array.tolist() for array in arrays]
        received[0][0] = ids[0] = 77  # as for a placeholder
        inputs = static.unpack(GraphSize(num_tokens + padding, is_decode))
        metadata, seq_padding = inputs.metadata, padding if is_decode else 10 - num_seqs
        assert inputs.input_ids.tolist() == [*ids, *[0] * padding]
        assert inputs.positions.tolist() == [*positions, *[0] * padding]
        assert metadata.slot_mapping.tolist() == [*slots, *[-1] * padding]
        assert metadata.context_lens.tolist() == [*lens, *[0] * seq_padding]
        assert np.array_equal(static.block_tables.cpu().numpy(), tables), "what lies beyond stays"
        assert metadata.query_start_loc.tolist() == [*starts, *[num_tokens] * seq_padding]
        assert metadata.is_decode == is_decode


class Recomputed:
    """In the place of a graph: computes the step when it is replayed, into the same memory."""

    def __init__(self, graphs, size):
        self.graphs, self.size, self.count = graphs, size, 0

    def replay(self):
        self.count += 1
        hidden, logits = self.graphs._forward(self.size)
        if self.count == 1:
            self.graphs._keep(self.size, hidden.clone(), None if logits is None else logits.clone())
        self.graphs.outputs[self.size].copy_(hidden)
        if logits is not None:
            self.graphs.logits[self.size].copy_(logits)


def use_graphs(llm, max_num_seqs, max_num_tokens=1):
    """Give the engine graphs of all sizes up to these; a step with prompts has two tokens or more."""
    worker = llm.llm_engine.executor.worker
    runner = worker.model_runner
    max_blocks = -(-runner.max_model_len // runner.block_size)
    graphs = StepGraphs(
        runner.model,
        worker.cache_engine.gpu_cache,
        max_num_seqs,
        max_num_tokens,
        max_blocks,
        worker.device,
        type(runner.sampler) is Sampler,
    )
    graphs.graphs = {size: Recomputed(graphs, size) for size in graphs.sizes}
    runner.graphs = graphs
    return graphs


@pytest.mark.parametrize("is_chunked", [False, True], ids=["whole", "chunked"])
@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one step", "two steps"])
def test_replays_give_the_tokens_of_eager_steps(tiny_folder, async_scheduling, is_chunked):  # noqa: F811
    """Batches that shrink, prompts in between or beside them, and placeholders of tokens that the host does not know yet."""
    options = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 100, "block_size": 4, "max_num_seqs": 6, "device": "cpu"}
    prompts = [[5 + i] * (1 + 5 * i % 17) for i in range(11)]
    wishes = ({"temperature": 0}, {"seed": 1}, {"seed": 2, "n": 2}, {"temperature": 0, "logprobs": 2})
    params = [SamplingParams(max_tokens=3 + 2 * i % 9, ignore_eos=True, **wishes[i % 4]) for i in range(11)]
    expected = LLM(str(tiny_folder), **options).generate(prompts, params, use_tqdm=False)
    budget = {"enable_chunked_prefill": True, "max_num_batched_tokens": 12} if is_chunked else {}
    llm = LLM(str(tiny_folder), async_scheduling=async_scheduling, **budget, **options)
    graphs = use_graphs(llm, 6, 40)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert token_ids(outputs) == token_ids(expected)
    counts = {tuple(size): graph.count for size, graph in graphs.graphs.items()}
    assert counts[6, True] and counts[4, True] and counts[32, False], counts


def token_ids(outputs):
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    ("sampler_cls", "limit"), [(None, 64), (None, 2), (type("Mine", (Sampler,), {}), 64)], ids=["all", "small", "own sampler"]
)
def test_logits_come_from_the_graph_where_it_has_them(tiny_folder, monkeypatch, sampler_cls, limit):  # noqa: F811
    """Not for larger batches than that, and not for a sampler of the user's, which may keep them."""
    monkeypatch.setattr(cuda_graphs, "MAX_LOGITS_SIZE", limit)
    options = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 100, "max_num_seqs": 4, "device": "cpu"}
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (4, 7, 10)]
    prompts = [[5, 6], [7], [8, 9, 10]]
    llm = LLM(str(tiny_folder), sampler_cls=sampler_cls, **options)
    expected = token_ids(llm.generate(prompts, params, use_tqdm=False))
    graphs, sizes = use_graphs(llm, 4), []
    compute_logits = LlamaForCausalLM.compute_logits

    @functools.wraps(compute_logits)
    def counted(model, hidden):
        sizes.append(len(hidden))
        return compute_logits(model, hidden)

    monkeypatch.setattr(LlamaForCausalLM, "compute_logits", counted)
    assert token_ids(llm.generate(prompts, params, use_tqdm=False)) == expected
    assert [graph.count for size, graph in graphs.graphs.items() if size.is_decode] == [3, 3, 3], (
        "of 1, 2 and 4 rows, the last for 3 sequences"
    )
    if sampler_cls is not None:
        assert sizes == [3, *[3] * 3, *[2] * 3, *[1] * 3], "the prefill, then the decodes; graphs compute none"
    else:
        decodes = [4 if limit == 64 else 3] * 3 + [2] * 3 + [1] * 3
        assert sizes == [3, *decodes], "by graphs with padding, if they are small enough"


def test_a_head_of_the_users_is_not_captured(tiny_folder):  # noqa: F811
    llm = LLM(str(tiny_folder), skip_tokenizer_init=True, num_gpu_blocks_override=10, device="cpu")
    model = llm.llm_engine.executor.worker.model_runner.model
    assert has_own_head(model)
    model.compute_logits = model.compute_logits
    assert not has_own_head(model), "replaced in this object"
    del model.compute_logits
    hook = model.lm_head.register_forward_hook(lambda *_: None)
    assert not has_own_head(model), "hooked"
    hook.remove()
    assert has_own_head(model)
    model.__class__ = type("Mine", (LlamaForCausalLM,), {"compute_logits": lambda self, hidden: 2 * self.lm_head(hidden)})
    assert not has_own_head(model), "overridden in a class"
