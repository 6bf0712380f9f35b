"""A model divided into stages computes what it computes in one piece, to the last bit: layers, logits, tokens, caches. And it loads, and fails, as one."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise

import pytest
import steps_in_processes
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from thread_ranks import engine_on_threads, make_pipelines
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, Qwen3Config, Qwen3ForCausalLM

from minivllm import SamplingParams
from minivllm.config import EngineArgs, ParallelConfig
from minivllm.engine.engine_config import EngineConfig
from minivllm.errors import ConfigError, ModelLoadError
from minivllm.layers.platform import Platform
from minivllm.models.stages import own_layers
from minivllm.models.weights import load_model
from minivllm.request import EngineCoreRequest
from minivllm.scheduler_output import ExecuteModelRequest, SequenceData
from minivllm.worker.worker import Worker

NUM_LAYERS = 5
COMMON = {
    "vocab_size": 323, "hidden_size": 48, "num_hidden_layers": NUM_LAYERS, "max_position_embeddings": 128, "eos_token_id": 2,
}  # fmt: skip
LLAMA = COMMON | {"intermediate_size": 96, "head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3}
MODELS = {
    "llama, tied": (LlamaForCausalLM, LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "llama": (LlamaForCausalLM, LlamaConfig(**LLAMA, tie_word_embeddings=False, attention_bias=True, mlp_bias=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**LLAMA, tie_word_embeddings=True)),
    "opt": (
        OPTForCausalLM,
        OPTConfig(**COMMON | {"hidden_size": 80, "word_embed_proj_dim": 80}, ffn_dim=96, num_attention_heads=5),
    ),
}
OPTIONS = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 60, "block_size": 8}
PREFIX = {"opt": "model.decoder."}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Tiny models with random weights, by name."""
    found = {}
    for name, (model_cls, config) in MODELS.items():
        torch.manual_seed(0)
        model = model_cls(config).float().eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.2)
        found[name] = tmp_path_factory.mktemp("tiny")
        model.save_pretrained(found[name])
    return found


def prompts_of(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 323, (length,), generator=generator).tolist() for length in lengths]


def generate(engine, prompts, params):
    """Tokens and log-probabilities of all requests, by their place."""
    return [
        (output.prompt_logprobs, [(completion.token_ids, completion.logprobs) for completion in output.outputs])
        for output in steps_in_processes.generate(engine, prompts, params)
    ]


def tokens_of(results):
    return [[token_ids for token_ids, _ in completions] for _, completions in results]


GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2, prompt_logprobs=1)
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=1, n=2, max_tokens=10, ignore_eos=True, logprobs=2)
PROMPTS = prompts_of([1, 9, 17, 40, 33])


NUMBERS = {
    "float32": {}, "eager": {"enforce_eager": True}, "int8": {"quantization": "int8"}, "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16", "attention_backend": "torch"},
}  # fmt: skip
BY_DAY = {(model, "float32"): () for model in MODELS} | {(model, "int8"): () for model in MODELS}
BY_DAY |= {("llama", way): pytest.mark.long for way in ("eager", "bfloat16", "float16")} | {("opt", "float16"): pytest.mark.long}
"""The other models with other numbers compile kernels for a minute and more."""


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        pytest.param(name, numbers, marks=BY_DAY.get((name, numbers), pytest.mark.nightly), id=f"{name}, {numbers}")
        for numbers in NUMBERS
        for name in MODELS
    ],
)
def test_stages_give_the_numbers_of_one(folders, name, numbers):
    options = NUMBERS[numbers]
    args = EngineArgs(str(folders[name]), **OPTIONS, **options)
    one = generate(engine_on_threads(args), PROMPTS, GREEDY)
    for num_stages, partition in ((2, None), (3, "1,1,3")):
        args.pp_layer_partition = partition
        engine = engine_on_threads(args, num_stages=num_stages)
        assert generate(engine, PROMPTS, GREEDY) == one
        if not options and name != "opt":
            way = "layer by layer, MLP compiled" if name == "qwen3" else "all layers in one compiled call"
            assert {worker.describe_model().partition(": ")[2] for worker in engine.executor.workers} == {way}


@pytest.mark.parametrize(
    "options",
    [
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 16, "max_num_seqs": 8, "enable_prefix_caching": True},
        {"num_gpu_blocks_override": 14, "preemption_mode": "swap", "swap_space": 0.01},
        {"num_gpu_blocks_override": 14},
        {"num_speculative_tokens": 3},
    ],
    ids=["chunks", "swap", "recompute", "drafts"],
)
@pytest.mark.parametrize("size", [(1, 3), (2, 2)], ids=str)
def test_tokens_of_stages_are_those_of_one(folders, options, size):
    """Greedy, and seeded with two continuations each, whose blocks are copied; ranks in each stage, too."""
    args = EngineArgs(str(folders["llama"]), **OPTIONS | options)
    one, several = engine_on_threads(args), engine_on_threads(args, *size)
    for params in (GREEDY, SEEDED):
        expected, found = generate(one, PROMPTS, params), generate(several, PROMPTS, params)
        assert tokens_of(found) == tokens_of(expected)
        if size[0] == 1:  # sums of several ranks are rounded otherwise
            assert found == expected


@pytest.mark.parametrize("name", ["qwen3", "opt"])
def test_ranks_in_stages_give_the_tokens_of_one(folders, name):
    args = EngineArgs(str(folders[name]), **OPTIONS)
    one, several = engine_on_threads(args), engine_on_threads(args, 2, 2)
    assert tokens_of(generate(several, PROMPTS, GREEDY)) == tokens_of(generate(one, PROMPTS, GREEDY))
    sizes = [{x for batch in worker.pipeline.sent for x in batch} for worker in several.executor.workers]
    names = {"hidden_states"} if name == "opt" else {"hidden_states", "residual"}
    assert sizes == [names, names, set(), set()]


@pytest.mark.long
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.sets(st.integers(1, NUM_LAYERS - 1)),
    st.integers(0, 99),
    st.booleans(),
)
def test_wherever_the_layers_are_cut(folders, lengths, cuts, seed, is_chunked):
    edges = [0, *sorted(cuts), NUM_LAYERS]
    partition = ",".join(str(stop - start) for start, stop in pairwise(edges))
    more = {"enable_chunked_prefill": True, "max_num_batched_tokens": 12, "max_num_seqs": 8} if is_chunked else {}
    args = EngineArgs(str(folders["llama, tied"]), **OPTIONS, **more)
    prompts = prompts_of(lengths, seed)
    one = generate(engine_on_threads(args), prompts, GREEDY)
    args.pp_layer_partition = partition
    assert generate(engine_on_threads(args, num_stages=len(cuts) + 1), prompts, GREEDY) == one


@settings(max_examples=settings().max_examples * 2 // 5)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=8),
    st.sampled_from([(1, 2), (1, 3), (2, 2)]),
    st.fixed_dictionaries(
        {},
        optional={
            "enable_chunked_prefill": st.just(True),
            "enable_prefix_caching": st.just(True),
            "num_gpu_blocks_override": st.just(14),
            "preemption_mode": st.just("swap"),
            "num_speculative_tokens": st.just(2),
        },
    ),
    st.integers(0, 99),
)
def test_batches_in_flight_give_the_tokens_of_one_at_a_time(folders, requests, size, options, seed):
    """A batch for each stage, of disjoint sequences, by the scheduler for stages: greedy and seeded requests, with copies, swaps and drafts."""
    args = EngineArgs(
        str(folders["llama"]), **OPTIONS | {"max_num_batched_tokens": 128, "max_num_seqs": 6, "swap_space": 0.001} | options
    )  # fmt: skip
    if args.enable_chunked_prefill:
        args.max_num_batched_tokens = 12
    results = []
    for engine in (engine_on_threads(args), engine_on_threads(args, *size, num_in_flight=size[1])):
        for i, (prompt, (_, is_seeded)) in enumerate(zip(prompts_of([n for n, _ in requests], seed), requests, strict=True)):
            engine.add_request(str(i), prompt, SEEDED if is_seeded else GREEDY)
        found = {}
        while engine.has_unfinished_requests():
            for output in engine.step():
                found[output.request_id] = (output.error, [completion.token_ids for completion in output.outputs])
        results.append(found)
        assert engine.engine_core.core.block_manager.gpu_allocator.num_free == args.num_gpu_blocks_override
        engine.executor.shutdown()
    assert results[0] == results[1] and len(results[0]) == len(requests)


# -- loading ---------------------------------------------------------------------------------------------------------


def load_stages(folder, num_stages):
    """The model of each stage."""
    config = EngineConfig.from_engine_args(EngineArgs(str(folder), pipeline_parallel_size=num_stages, **OPTIONS)).model_config
    stages = [pipeline.stage for pipeline in make_pipelines(ParallelConfig(pipeline_parallel_size=num_stages))]
    return [load_model(config, Platform(torch.device("cpu"), torch.float16, stage=stage)) for stage in stages]  # not packed


@pytest.mark.parametrize("name", MODELS)
def test_each_stage_has_its_layers_alone(folders, name):
    """Together they have all weights, under the names of the checkpoint, and a head that is the embedding twice."""
    whole, *_ = load_stages(folders[name], 1)
    models = load_stages(folders[name], 3)
    parameters = [dict(model.named_parameters()) for model in models]
    names = [weight for part in parameters for weight in part]
    assert set(names) == set(dict(whole.named_parameters()))
    twice = [weight for weight in set(names) if names.count(weight) > 1]
    assert twice == ([] if name == "llama" else [f"{PREFIX.get(name, 'model.')}embed_tokens.weight"])
    for part in parameters:
        assert all(torch.equal(weight, whole.get_parameter(place)) for place, weight in part.items())
    decoders = [model.model.decoder if name == "opt" else model.model for model in models]
    assert [len(own_layers(decoder.layers)) for decoder in decoders] == [2, 2, 1]
    assert all(".layers." in weight for weight in parameters[1])


def test_layers_whose_numbers_begin_alike(tmp_path):
    """Layers 10 and 11 are not taken for parts of layer 1, which is elsewhere."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA | {"num_hidden_layers": 12})).save_pretrained(tmp_path)
    (whole,), models = load_stages(tmp_path, 1), load_stages(tmp_path, 3)
    for model in models:
        assert all(torch.equal(weight, whole.get_parameter(name)) for name, weight in model.named_parameters())
    assert [[i for i, layer in enumerate(model.model.layers) if list(layer.parameters())] for model in models] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11],
    ]  # fmt: skip


@pytest.fixture
def changed(folders, tmp_path):
    """Copies a model with some weights taken away, and others added."""

    def change(name, remove=(), add=()):
        folder = shutil.copytree(folders[name], tmp_path / "changed", dirs_exist_ok=True)
        weights = load_file(folder / "model.safetensors")
        for key in remove:
            del weights[key]
        save_file(weights | {key: torch.zeros(48) for key in add}, folder / "model.safetensors", {"format": "pt"})
        return folder

    return change


@pytest.mark.parametrize(
    ("remove", "add", "words"),
    [
        (["model.layers.0.self_attn.q_proj.weight"], [], "incomplete: model.layers.0.self_attn.q_proj.weight missing"),
        (["model.layers.4.mlp.up_proj.weight"], [], "incomplete: model.layers.4.mlp.up_proj.weight missing"),
        (["model.norm.weight"], [], "incomplete: model.norm.weight missing"),
        (["model.embed_tokens.weight"], [], "incomplete: model.embed_tokens.weight missing"),
        (["lm_head.weight"], [], "incomplete: lm_head.weight missing"),
        ([], ["model.layers.5.mlp.up_proj.weight"], "no place for 'model.layers.5.mlp.up_proj.weight'"),
        ([], ["model.layers.4.mlp.other.weight"], "no place for 'model.layers.4.mlp.other.weight'"),
        ([], ["model.norm.bias"], "no place for 'model.norm.bias'"),
        ([], ["model.other"], "no place for 'model.other'"),
    ],
)
def test_what_no_stage_has_and_what_is_missing_is_told(changed, remove, add, words):
    with pytest.raises(ModelLoadError, match=words):
        load_stages(changed("llama", remove, add), 3)


def test_without_its_own_copy_of_the_embedding_the_last_stage_has_no_head(changed):
    with pytest.raises(ModelLoadError, match="incomplete: model.embed_tokens.weight missing"):
        load_stages(changed("llama, tied", ["model.embed_tokens.weight"]), 3)


def test_a_head_that_differs_from_the_embedding_counts(changed, folders):
    """The config says that they are tied, but the checkpoint has another head, which is used, as by one stage."""
    folder = changed("llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    found = generate(engine_on_threads(EngineArgs(str(folder), **OPTIONS), num_stages=2), PROMPTS, GREEDY)
    assert found == generate(engine_on_threads(EngineArgs(str(folders["llama"]), **OPTIONS)), PROMPTS, GREEDY)


# -- the cache and memory --------------------------------------------------------------------------------------------


def make_workers(folder, num_stages, **options):
    args = EngineArgs(str(folder), pipeline_parallel_size=num_stages, skip_tokenizer_init=True, **options)
    config = EngineConfig.from_engine_args(args)
    configs = (config.model_config, config.cache_config, config.scheduler_config, config.worker_config)
    return [Worker(*configs, pipeline=pipeline) for pipeline in make_pipelines(config.parallel_config)]


@pytest.mark.parametrize("name", ["llama, tied", "opt"])
def test_a_stage_measures_its_memory_alone(folders, name):
    """Also where no other stage takes part."""
    (whole,) = make_workers(folders[name], 1)
    for worker in make_workers(folders[name], 2)[::-1]:
        worker.load_model()
        on_device, on_host = worker.determine_num_available_blocks()
        assert on_device > 0 and on_host == 0
        worker.initialize_cache(10, 2)
        num_layers = len(worker.pipeline.stage.layers(NUM_LAYERS))
        cache = worker.cache_engine
        assert len(cache.gpu_cache) == num_layers and len(cache.gpu_blocks) == len(cache.cpu_blocks) == 2 * num_layers
        assert worker.block_bytes == whole.block_bytes * num_layers // NUM_LAYERS
        assert worker.pipeline.sent == [] and worker.pipeline.spans == []


def test_a_block_takes_the_memory_of_the_stages_layers(folders):
    workers = make_workers(folders["llama"], 2, kv_cache_memory_bytes=2**20)
    found = []
    for worker in workers:
        worker.load_model()
        found.append(worker.determine_num_available_blocks()[0])
    assert [len(worker.pipeline.stage.layers(NUM_LAYERS)) for worker in workers] == [3, 2]
    assert found == [2**20 // 18_432, 2**20 // 12_288]
    (tight, _) = make_workers(folders["llama"], 2, kv_cache_memory_bytes=100)
    tight.load_model()
    with pytest.raises(ConfigError, match="one block of 16 tokens takes 18,432"):
        tight.determine_num_available_blocks()


# -- failures --------------------------------------------------------------------------------------------------------


def boom(*_):
    raise ValueError("boom")


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("where", ["move blocks", "forward"])
def test_a_step_that_fails_on_one_stage_fails_alone(folders, failing, where, monkeypatch):
    """All stages leave it, with an error that names the stage where it began, and the next step is as any other."""
    args = EngineArgs(str(folders["llama"]), **OPTIONS)
    engine, expected = engine_on_threads(args, num_stages=3), generate(engine_on_threads(args), PROMPTS, GREEDY)
    workers, errors = engine.executor.workers, {}
    for rank, worker in enumerate(workers):

        def run(request, rank=rank, execute_model=worker.execute_model):
            try:
                return execute_model(request)
            except Exception as error:
                errors[rank] = f"{type(error).__name__}: {error}"
                raise

        monkeypatch.setattr(worker, "execute_model", run)
    with monkeypatch.context() as patch:
        owner, name = (
            (workers[failing].cache_engine, "copy") if where == "move blocks" else (workers[failing].model_runner, "model")
        )
        patch.setattr(owner, name, boom)
        engine.add_request("failing", PROMPTS[0], GREEDY)
        (output,) = engine.step()
    assert output.finished and "boom" in output.error
    assert errors == {failing: "ValueError: boom"} | dict.fromkeys(
        range(failing + 1, 3), f"StageError: Stage {failing} of 3 (rank {failing}) failed: ValueError: boom"
    )
    assert generate(engine, PROMPTS, GREEDY) == expected


def test_where_there_is_nothing_to_compute_stages_tell_each_other_nothing(folders, monkeypatch):
    """A step that only moves blocks, and fails, concerns no other stage, and leaves nothing behind for the next step."""
    first, last = make_workers(folders["llama"], 2)
    for worker in (first, last):
        worker.load_model()
        worker.initialize_cache(4, 0)
    with monkeypatch.context() as patch:
        patch.setattr(first.cache_engine, "copy", boom)
        with pytest.raises(ValueError, match="boom"):
            first.execute_model(ExecuteModelRequest([]))
    request = EngineCoreRequest("0", [5, 6, 7], SamplingParams(temperature=0), max_num_tokens=8)
    step = ExecuteModelRequest(
        [SequenceData(request, 0, 0, [5, 6, 7], 0, [0], 0, [], num_samples=1, num_drafts=0, is_decode=False)]
    )
    assert first.execute_model(step) == []
    (output,) = last.execute_model(step)
    assert len(output.token_ids) == 1
    assert first.execute_model(ExecuteModelRequest([])) == last.execute_model(ExecuteModelRequest([])) == []


def test_what_stages_send_is_timed(folders):
    engine = engine_on_threads(EngineArgs(str(folders["llama"]), **OPTIONS), num_stages=3)
    generate(engine, PROMPTS[:1], SamplingParams(max_tokens=3, ignore_eos=True))
    for worker, count in zip(engine.executor.workers, (1, 2, 1), strict=True):
        spans, num_bytes = worker.take_timing()
        assert len(spans) == 3 * count and spans == sorted(spans)  # three steps
        assert num_bytes == 3 * count * 2 * 48 * 4  # hidden states and residual of one token
