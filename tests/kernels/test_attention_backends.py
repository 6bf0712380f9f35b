"""Which attention backend serves where, the engine on each of them, and the padded batches of CUDA graphs."""

from __future__ import annotations

import importlib.util
import itertools
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_invariants_on_a_model import tiny_folder  # noqa: F401 (a fixture)
from test_models import engine_logits, random_prompts, tiny  # noqa: F401 (a fixture)

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError, KernelError
from minivllm.layers.attention import AttentionBackend, AttentionMetadata
from minivllm.layers.attention_backends import BACKENDS, TorchAttentionBackend, get_attention_backend
from minivllm.request import EngineCoreRequest, Request, Sequence
from minivllm.scheduler_output import ScheduledSequence
from minivllm.worker.cuda_graphs import MAX_DECODES, MAX_TOKENS, GraphSize, StepGraphs, graph_sizes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def missing(monkeypatch):
    """Makes a package look as if it were not installed."""
    find_spec = importlib.util.find_spec

    def forget(name):
        monkeypatch.setattr(importlib.util, "find_spec", lambda asked, *args: None if asked == name else find_spec(asked, *args))

    return forget


# -- the choice --------------------------------------------------------------------------------------------------------


def test_auto_takes_numba_on_a_cpu_and_triton_on_a_gpu():
    assert get_attention_backend("auto", CPU) is BACKENDS["cpu"]
    if torch.cuda.is_available():
        assert get_attention_backend("auto", CUDA) is BACKENDS["triton"]


def test_a_class_of_ones_own_is_taken_as_it_is():
    class Mine(TorchAttentionBackend):
        pass

    assert get_attention_backend(Mine, CPU) is Mine


def test_a_missing_library_leaves_the_torch_backend(missing, caplog):
    missing("numba")
    assert get_attention_backend("auto", CPU) is TorchAttentionBackend
    assert not caplog.records
    assert get_attention_backend("cpu", CPU) is TorchAttentionBackend
    assert "Numba is not installed, so attention_backend is 'torch' instead of 'cpu'" in caplog.text


@pytest.mark.parametrize(("capability", "name"), [((7, 5), "torch"), ((8, 0), "triton"), ((9, 0), "triton")])
def test_a_gpu_that_is_too_old_for_the_tiles_gets_the_torch_backend(monkeypatch, missing, capability, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert get_attention_backend("auto", CUDA) is BACKENDS[name]
    missing("triton")
    assert get_attention_backend("auto", CUDA) is TorchAttentionBackend


def test_the_cpu_backend_refuses_a_gpu():
    with pytest.raises(ConfigError, match="attention_backend is 'cpu', but the model is to run on cuda"):
        get_attention_backend("cpu", CUDA)


def run_python(code: str, **environment: str) -> str:
    """What a fresh Python prints, without TRITON_INTERPRET unless given."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


ASK_FOR_TRITON = """
import torch
from minivllm.errors import ConfigError
from minivllm.layers.attention_backends import get_attention_backend
try:
    for _ in range(3):
        get_attention_backend("triton", torch.device("cpu"))
except ConfigError as error:
    print("refused:", error)
"""


@pytest.mark.slow
@without_gpu
def test_triton_on_a_cpu_says_once_that_it_is_interpreted():
    said = run_python(ASK_FOR_TRITON)
    assert said.count("The Triton kernels run interpreted") == 1
    assert "refused" not in said


@pytest.mark.slow
@without_gpu
def test_triton_that_was_imported_for_compiling_is_refused_with_a_way_out():
    said = run_python("import triton\n" + ASK_FOR_TRITON)
    assert "refused: Without a GPU, Triton kernels run interpreted, but another package has imported Triton already" in said
    assert "set TRITON_INTERPRET=1" in said
    assert "refused" not in run_python("import triton\n" + ASK_FOR_TRITON, TRITON_INTERPRET="1")


@pytest.mark.slow
def test_triton_that_is_not_installed_is_refused():
    hide = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == "triton" else find_spec(name, *args)
"""
    assert "refused: Triton is not installed (it exists for Linux only): use the attention backend 'cpu'" in run_python(
        hide + ASK_FOR_TRITON
    )


def device_of(backend: str) -> str:
    """The device to test a backend on."""
    return "cpu" if backend == "cpu" else "auto"


# -- the engine on each ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(batch=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 14)), min_size=1, max_size=6), seed=st.integers(0, 2**31))
def test_long_prompts_short_ones_and_chunks_share_a_batch_on_a_cpu(batch, seed):
    """Each sequence is (new tokens, tokens cached before). Those with one new token go another way than the others."""
    generator, block_size, num_heads, num_kv_heads, head_dim = torch.Generator().manual_seed(seed), 4, 4, 2, 16
    lengths = [new + before if new else 0 for new, before in batch]
    rows = sum(new for new, _ in batch)
    tables = torch.arange(9 * len(batch), dtype=torch.int32).flip(0).view(len(batch), 9)
    positions = [(seq, t) for seq, (new, _) in enumerate(batch) for t in range(lengths[seq] - new, lengths[seq])]
    slots = torch.tensor(
        [int(tables[seq, t // block_size]) * block_size + t % block_size for seq, t in positions], dtype=torch.int64
    )
    metadata = AttentionMetadata(
        is_decode=False, slot_mapping=slots, block_tables=tables, context_lens=torch.tensor(lengths, dtype=torch.int32),
        query_start_loc=torch.tensor([0, *itertools.accumulate(new for new, _ in batch)], dtype=torch.int32),
    )  # fmt: skip
    query, key, value = (
        torch.randn(rows, heads, head_dim, generator=generator) for heads in (num_heads, num_kv_heads, num_kv_heads)
    )
    caches = [torch.randn(9 * len(batch), block_size, num_kv_heads, head_dim, generator=generator) for _ in range(2)]
    results = []
    for name in ("torch", "cpu"):
        own = tuple(cache.clone() for cache in caches)
        backend = BACKENDS[name](num_heads, num_kv_heads, head_dim, head_dim**-0.5)
        results.append((backend(query, key, value, own, metadata), *own))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "cpu", "triton"])
def test_logits_are_those_of_every_backend(tiny, backend):  # noqa: F811
    """test_models.py holds the default backend against transformers, for the same architectures."""
    _, folder = tiny
    prompts = random_prompts([1, 7, 8, 9, 30])
    options = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 40, "block_size": 8}
    default = engine_logits(LLM(str(folder), **options), prompts)
    other = engine_logits(LLM(str(folder), attention_backend=backend, device=device_of(backend), **options), prompts)
    for one, two in zip(default, other, strict=True):
        assert (one - two).abs().max() < 1e-3


@pytest.mark.slow
@without_gpu
@pytest.mark.long
def test_interpreted_triton_generates_the_reference_tokens():
    """The default model as anybody would ask for it, all its kernels interpreted: a prefill and two decodes."""
    prompts, params = ["The capital of France is", "Hello"], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    llm = LLM("smollm2-135m", attention_backend="triton")
    expected = LLM("smollm2-135m", attention_backend="torch").generate(prompts, params, use_tqdm=False)
    for one, two in zip(llm.generate(prompts, params, use_tqdm=False), expected, strict=True):
        assert one.outputs[0].token_ids == two.outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_tiny_requests_get_the_same_tokens_with_every_backend(tiny_folder, backend):  # noqa: F811
    """With few blocks and swapping, forks and chunks, so that blocks are moved in every way."""
    params = SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=8, ignore_eos=True)
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8, 9], [1, 2, 3, 4, 5, 9, 9], list(range(1, 20))]
    options = {"skip_tokenizer_init": True, "max_model_len": 40, "block_size": 4, "max_num_seqs": 6}
    plenty = LLM(str(tiny_folder), attention_backend="torch", num_gpu_blocks_override=100, **options)
    expected = plenty.generate(prompts, params, use_tqdm=False)
    few = {"num_gpu_blocks_override": 14, "preemption_mode": "swap", "swap_space": 1e-4}
    chunks = {"enable_chunked_prefill": True, "max_num_batched_tokens": 9, "enable_prefix_caching": True}
    llm = LLM(str(tiny_folder), attention_backend=backend, device=device_of(backend), **options, **few, **chunks)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [[c.token_ids for c in o.outputs] for o in outputs] == [[c.token_ids for c in o.outputs] for o in expected]
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_a_backend_of_ones_own_serves_in_the_real_engine(tiny_folder):  # noqa: F811
    calls = []

    class Mine(TorchAttentionBackend):
        def forward(self, query, key, value, kv_cache, metadata):
            calls.append((len(query), metadata.is_decode))
            return super().forward(query, key, value, kv_cache, metadata)

    options = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 8}
    mine = LLM(str(tiny_folder), attention_backend=Mine, **options)
    calls.clear()
    prompt = [1, 2, 3, 4, 5]
    (output,) = mine.generate(prompt, GREEDY, use_tqdm=False)
    (expected,) = LLM(str(tiny_folder), **options).generate(prompt, GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    num_layers = mine.llm_engine.model_config.num_layers
    assert calls == [(len(prompt), False)] * num_layers + [(1, True)] * num_layers * 5


def test_the_interface_must_be_filled():
    with pytest.raises(TypeError, match="abstract"):
        AttentionBackend(1, 1, 64, 1.0)


def test_a_block_table_that_cannot_be_is_refused_before_it_is_read(tiny_folder):  # noqa: F811
    """As from a learner's block space manager: kernels believe their tables, so the model runner does not."""
    llm = LLM(str(tiny_folder), skip_tokenizer_init=True, num_gpu_blocks_override=4, block_size=4)
    worker = llm.llm_engine.executor.worker
    seq = Sequence(0, Request(EngineCoreRequest("a", [1, 2, 3, 4, 5], SamplingParams(), max_num_tokens=9)))
    for table, message in (([0, 4], "names block 4, but the cache has 4"), ([0, -1], "names block -1"), ([0], "is too short")):
        with pytest.raises(KernelError, match=message):
            worker.model_runner.execute_model([ScheduledSequence(seq, 5, table).to_data()], worker.cache_engine.gpu_cache)
    too_long = Sequence(0, Request(EngineCoreRequest("b", [1] * 65, SamplingParams(), max_num_tokens=70)))
    with pytest.raises(KernelError, match="has 65 tokens, but the model runs with positions for 64"):
        worker.model_runner.execute_model([ScheduledSequence(too_long, 65, [0] * 17).to_data()], worker.cache_engine.gpu_cache)


# -- CUDA graphs -------------------------------------------------------------------------------------------------------


def test_graph_sizes_cover_every_batch():
    def sizes(is_decode, *limits):
        return [size.num_tokens for size in graph_sizes(*limits) if size.is_decode == is_decode]

    assert sizes(True, 1, 64) == [1]
    assert sizes(True, 7, 64) == [1, 2, 4, 7]
    assert sizes(True, 32, 64) == [1, 2, 4, 8, 16, 24, 32]
    assert sizes(True, 1000, 8192)[-1] == MAX_DECODES
    assert sizes(False, 4, 20) == [20]
    assert sizes(False, 4, 200) == [32, 48, 64, 96, 128, 192, 200]
    assert sizes(False, 4, 8192)[-5:] == [512, 640, 768, 896, MAX_TOKENS]
    assert graph_sizes(7, 200)[-1].num_tokens == 200, "the largest is captured first"


@pytest.mark.parametrize("backend", list(BACKENDS))
@torch.inference_mode()
def test_a_padded_decode_gives_the_same_and_writes_nothing_more(tiny_folder, backend):  # noqa: F811
    """What a graph replays, computed without one: fixed buffers, wider tables, rows of padding, left-overs of larger steps."""
    options = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 20, "block_size": 4, "enforce_eager": True}
    llm = LLM(str(tiny_folder), attention_backend=backend, device=device_of(backend), **options)
    worker = llm.llm_engine.executor.worker
    runner, caches = worker.model_runner, worker.cache_engine.gpu_cache
    for cache in (tensor for pair in caches for tensor in pair):
        cache.normal_()
    graphs = StepGraphs(runner.model, caches, max_num_seqs=6, max_num_tokens=32, max_blocks=10, device=worker.device)
    for lens in ([3, 17, 8, 9, 1], [12, 4], [20]):
        scheduled = []
        for i, length in enumerate(lens):
            seq = Sequence(i, Request(EngineCoreRequest(str(i), [1] * (length + 1), SamplingParams(), max_num_tokens=40)))
            seq.num_computed_tokens = length
            scheduled.append(ScheduledSequence(seq, 1, [(i * 5 + j) % 20 for j in range(length // 4 + 1)]).to_data())
        runner.graphs = None
        inputs = runner.prepare_inputs(scheduled, num_blocks=20)
        before = [tensor.clone() for pair in caches for tensor in pair]
        expected = runner.model(inputs.input_ids, inputs.positions, caches, inputs.metadata)
        written = [tensor.clone() for pair in caches for tensor in pair]
        for tensor, old in zip((tensor for pair in caches for tensor in pair), before, strict=True):
            tensor.copy_(old)
        runner.graphs = graphs
        packed = runner.prepare_inputs(scheduled, num_blocks=20)
        assert packed.graph_size == GraphSize(6 if len(lens) > 4 else 4 if len(lens) > 2 else len(lens), True)
        assert inputs.graph_size is None
        padded = graphs.inputs.unpack(GraphSize(6, is_decode=True))
        hidden = runner.model(padded.input_ids, padded.positions, caches, padded.metadata)
        assert torch.allclose(hidden[: len(lens)], expected, atol=1e-5)
        for tensor, new in zip((tensor for pair in caches for tensor in pair), written, strict=True):
            assert torch.allclose(tensor, new, atol=1e-5)


def test_only_steps_that_fit_are_replayed(tiny_folder):  # noqa: F811
    llm = LLM(str(tiny_folder), skip_tokenizer_init=True, num_gpu_blocks_override=20, block_size=4, enforce_eager=True)
    worker = llm.llm_engine.executor.worker
    runner = worker.model_runner
    runner.graphs = StepGraphs(runner.model, worker.cache_engine.gpu_cache, 2, 7, 3, worker.device)

    def can_run(num_seqs, num_tokens, num_blocks):
        seq = Sequence(0, Request(EngineCoreRequest("a", [1] * num_tokens, SamplingParams(), max_num_tokens=40)))
        item = ScheduledSequence(seq, num_tokens, list(range(num_blocks))).to_data()
        return runner.prepare_inputs([item] * num_seqs, num_blocks=20).graph_size is not None

    assert can_run(1, 1, 1)
    assert can_run(2, 1, 3)
    assert not can_run(3, 1, 1), "too many sequences"
    assert not can_run(1, 1, 4), "too long a table"
    assert can_run(1, 7, 2)
    assert can_run(2, 3, 3)
    assert not can_run(2, 4, 3), "too many tokens"
    assert not can_run(3, 2, 1), "too many sequences for so few tokens"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_graphs_on_and_off_give_equal_tokens(tiny_folder):  # noqa: F811
    """In float32: in bfloat16, a padded batch may be multiplied in another order, and near ties fall either way."""
    options = {
        "skip_tokenizer_init": True,
        "block_size": 8,
        "num_gpu_blocks_override": 200,
        "max_num_seqs": 12,
        "dtype": "float32",
    }
    prompts = random_prompts([1, 7, 8, 30, 12, 19, 3, 3, 25, 16], vocab_size=50)
    params = [SamplingParams(temperature=0, max_tokens=4 + i, ignore_eos=True) for i in range(len(prompts))]
    tokens = []
    for enforce_eager in (True, False):
        llm = LLM(str(tiny_folder), enforce_eager=enforce_eager, **options)
        assert (llm.llm_engine.executor.worker.model_runner.graphs is None) == enforce_eager
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]
