"""A model divided among ranks computes what it computes in one piece: layers, logits, tokens, caches."""

from __future__ import annotations

import gc
import math

import pytest
import steps_in_processes
import torch
from thread_ranks import engine_on_threads, make_groups, on_all_ranks
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM, Qwen3Config, Qwen3ForCausalLM

from minivllm import SamplingParams
from minivllm.config import EngineArgs
from minivllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from minivllm.layers.platform import Platform
from minivllm.layers.weights import CheckpointTensor
from minivllm.models.weights import iterate_weights

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")
WAYS = {
    "float32": {"dtype": torch.float32},
    "unpacked": {"dtype": torch.float32},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"dtype": torch.float32, "quantization": "int8"},
}
TOLERANCE = {"float32": 1e-5, "unpacked": 1e-5, "bfloat16": 2e-2, "int8": 3e-2}


class Reads:
    """A checkpoint tensor that counts the numbers read from it."""

    def __init__(self, tensor):
        self.tensor, self.count = tensor, 0

    def get_shape(self):
        return list(self.tensor.shape)

    def __getitem__(self, region):
        self.count += self.tensor[region].numel()
        return self.tensor[region]


def load(layer, kind, tensor, *shard_id):
    source = Reads(tensor)
    layer.load_weight(getattr(layer, kind), CheckpointTensor("model", kind, source), *shard_id)
    return source.count


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) / math.sqrt(shape[-1])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@torch.inference_mode()
def test_a_pair_of_layers_needs_one_sum(way, world_size, monkeypatch):
    """Attention's pair and the MLP's, on uneven parts: each rank reads and holds its part alone, and all get the whole result."""
    if way == "unpacked":
        monkeypatch.setattr("minivllm.layers.platform.PACKED_WEIGHTS", {})
    hidden_size, width, head_dim, num_heads, num_kv_heads = 48, 80, 8, 9, 3
    gate, up, down = random(width, hidden_size), random(width, hidden_size), random(hidden_size, width)
    q, k, v = (random(heads * head_dim, hidden_size) for heads in (num_heads, num_kv_heads, num_kv_heads))
    o, bias = random(hidden_size, num_heads * head_dim), random(hidden_size)
    x = random(5, hidden_size)
    groups = make_groups(world_size)

    def compute(group):
        platform = Platform(CPU, WAYS[way]["dtype"], quantization=WAYS[way].get("quantization"), group=group)
        gate_up = MergedColumnParallelLinear(hidden_size, [width, width], False, platform)
        down_proj = RowParallelLinear(width, hidden_size, True, platform)
        qkv = QKVParallelLinear(hidden_size, head_dim, num_heads, num_kv_heads, False, platform)
        o_proj = RowParallelLinear(num_heads * head_dim, hidden_size, False, platform, qkv.query_channels)
        count = load(gate_up, "weight", gate, 0) + load(gate_up, "weight", up, 1) + load(down_proj, "weight", down)
        load(down_proj, "bias", bias)
        count += sum(load(qkv, "weight", tensor, i) for i, tensor in enumerate((q, k, v))) + load(o_proj, "weight", o)
        for layer in (gate_up, down_proj, qkv, o_proj):
            layer.process_weights_after_loading()
        first, second = gate_up(x).split(gate_up.out_features, dim=1)
        queries = qkv(x)[:, : qkv.out_features[0]]
        return down_proj(first * second), o_proj(queries.contiguous()), count, group.calls

    results = on_all_ranks(compute, groups)
    whole = sum(tensor.numel() for tensor in (gate, up, down, q, k, v, o))
    assert sum(count for _, _, count, _ in results) == whole
    assert max(count for _, _, count, _ in results) < (0.72 if world_size > 1 else 1.01) * whole
    expected = ((x @ gate.t()) * (x @ up.t())) @ down.t() + bias, (x @ q.t()) @ o.t()
    for mlp, attention, _, calls in results:
        for found, wanted in zip((mlp, attention), expected, strict=True):
            assert (found - wanted).norm() < TOLERANCE[way] * wanted.norm()
        assert torch.equal(mlp, results[0][0]) and torch.equal(attention, results[0][1])
        assert [kind for kind, _ in calls] == ["all_reduce"] * 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_the_vocabulary_is_divided(way, tied, monkeypatch):
    if way == "unpacked":
        monkeypatch.setattr("minivllm.layers.platform.PACKED_WEIGHTS", {})
    vocab_size, hidden_size = 37, 24
    weight, head_weight = random(vocab_size, hidden_size), random(vocab_size, hidden_size + 0)
    token_ids = torch.tensor([0, 36, 18, 19, 18])

    def compute(group):
        platform = Platform(CPU, WAYS[way]["dtype"], quantization=WAYS[way].get("quantization"), group=group)
        embedding = VocabParallelEmbedding(vocab_size, hidden_size, platform)
        head = ParallelLMHead(hidden_size, vocab_size, platform, embedding if tied else None)
        load(embedding, "weight", weight)
        if not tied:
            load(head, "weight", head_weight)
            head.process_weights_after_loading()
        embedding.process_weights_after_loading()
        x = embedding(token_ids)
        return x, head(x)

    (one, logits), *_ = on_all_ranks(compute, make_groups(1))
    results = on_all_ranks(compute, make_groups(3))
    for x, _ in results:
        torch.testing.assert_close(x, one, rtol=0, atol=0)
    assert [found is None for _, found in results] == [False, True, True]
    torch.testing.assert_close(results[0][1], logits, rtol=1e-5, atol=1e-5)


def test_a_layer_of_one_output_channel_for_each_rank():
    x = random(2, 6)

    def compute(group):
        layer = ColumnParallelLinear(6, 3, True, Platform(CPU, torch.float32, group=group))
        weight, bias = random(3, 6), random(3)
        load(layer, "weight", weight)
        load(layer, "bias", bias)
        layer.process_weights_after_loading()
        torch.testing.assert_close(layer(x), (x @ weight.t() + bias)[:, group.rank : group.rank + 1])

    on_all_ranks(compute, make_groups(3))


# -- whole models ----------------------------------------------------------------------------------------------------

COMMON = {"vocab_size": 323, "hidden_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 128, "eos_token_id": 2}
LLAMA = COMMON | {"intermediate_size": 88, "head_dim": 16}
MODELS = {
    "llama": (
        LlamaForCausalLM,
        LlamaConfig(**LLAMA, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True, attention_bias=True),
    ),
    "llama, 3 KV heads": (
        LlamaForCausalLM,
        LlamaConfig(**LLAMA, num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=False, mlp_bias=True),
    ),
    "llama, one KV head": (LlamaForCausalLM, LlamaConfig(**LLAMA, num_attention_heads=4, num_key_value_heads=1)),
    "qwen3": (
        Qwen3ForCausalLM,
        Qwen3Config(**LLAMA, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    ),
    "opt": (
        OPTForCausalLM,
        OPTConfig(**COMMON | {"hidden_size": 80, "word_embed_proj_dim": 80}, ffn_dim=88, num_attention_heads=5),
    ),
}
WHEN = {"llama": pytest.mark.nightly, "llama, one KV head": pytest.mark.long, "qwen3": pytest.mark.long}
"""Models that are not divided in any case."""
OPTIONS = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 60, "block_size": 8}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=WHEN.get(name, ())) for name in MODELS])
def model(request, tmp_path_factory):
    """A tiny model with random weights, in transformers and as a folder."""
    model_cls, config = MODELS[request.param]
    torch.manual_seed(0)
    model = model_cls(config).float().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.2)
    folder = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(folder)
    return model, folder


def prompts_of(lengths, vocab_size=323, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def generate(engine, prompts, params):
    """All texts, by the request's place."""
    return [
        [completion.token_ids for completion in output.outputs] for output in steps_in_processes.generate(engine, prompts, params)
    ]


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.long)])
def test_tokens_of_several_ranks_are_those_of_one(model, world_size):
    """Greedy and seeded, with chunks, prefix cache, preemption by both ways, n > 1 and drafts; greedy ones also those of transformers."""
    hf_model, folder = model
    prompts = prompts_of([1, 9, 17, 40, 33])
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    expected = [
        hf_model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, max_new_tokens=16, min_new_tokens=16,
            pad_token_id=0, eos_token_id=None,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]  # fmt: skip
    seeded = SamplingParams(temperature=0.8, top_p=0.9, seed=1, n=2, max_tokens=12, ignore_eos=True, logprobs=2)
    one = generate(engine_on_threads(EngineArgs(str(folder), **OPTIONS), 1), prompts, seeded)
    more = {
        "": {},
        "chunks": {
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 8,
            "enable_prefix_caching": True,
        },
        "swap": {"num_gpu_blocks_override": 14, "preemption_mode": "swap", "swap_space": 0.01},
        "recompute": {"num_gpu_blocks_override": 14},
        "drafts": {"num_speculative_tokens": 3},
    }
    for name, options in more.items():
        if world_size > 2 and name in ("swap", "recompute", "drafts"):  # shown with two ranks
            continue
        engine = engine_on_threads(EngineArgs(str(folder), **OPTIONS | options), world_size)
        assert generate(engine, prompts, greedy) == [[token_ids] for token_ids in expected], name
        assert generate(engine, prompts, seeded) == one, name


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=() if name == "llama, 3 KV heads" else pytest.mark.long)
        for name in ("llama, 3 KV heads", "qwen3", "opt")
    ],
    indirect=True,
)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.nightly),
        pytest.param({"quantization": "int8"}, marks=pytest.mark.long),
        {"attention_backend": "torch"},
    ],
    ids=str,
)
def test_other_dtypes_are_near(model, options):
    """Log-probabilities of a prompt are near those in float32; how near, is what one rank shows."""
    _, folder = model
    (prompt,) = prompts_of([40])
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(world_size, **options):
        engine = engine_on_threads(EngineArgs(str(folder), **OPTIONS, **options), world_size)
        engine.add_request("0", prompt, params)
        (output,) = engine.step()
        return torch.tensor(
            [entry[token_id].logprob for token_id, entry in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
        )

    exact = logprobs(1)
    allowed = 3 * (logprobs(1, **options) - exact).abs().mean() + 1e-5
    for world_size in (2, 3):
        assert (logprobs(world_size, **options) - exact).abs().mean() < allowed


def test_each_rank_holds_its_part_of_weights_and_cache(smollm2_path):
    """Two ranks of the default model: 2 + 1 of 3 KV heads, half of the MLP and of the vocabulary."""
    args = EngineArgs(str(smollm2_path), num_gpu_blocks_override=10)
    workers = engine_on_threads(args, 2).executor.workers
    numbers = [
        sum(module.method.packed.words.numel() for module in worker.model_runner.model.modules() if hasattr(module, "method"))
        for worker in workers
    ]
    whole = sum(
        source.get_shape()[0] * source.get_shape()[1]
        for _, source in iterate_weights(smollm2_path)
        if len(source.get_shape()) == 2
    )
    assert sum(numbers) == whole
    assert [worker.cache_engine.gpu_cache[0][0].shape[2] for worker in workers] == [2, 1]
    assert max(numbers) / whole < 0.54
    del workers
    gc.collect()
