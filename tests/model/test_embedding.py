"""An embedding gives the rows of its weight, and holds them once where the head is the same weight."""

import mmap
import os
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
from torch import nn

from minivllm import LLM
from minivllm.errors import ModelLoadError
from minivllm.kernels import reference
from minivllm.kernels.pages import LARGE_BYTES, SHARED_BYTES, SharedPages, return_freed_memory, zero_pages
from minivllm.layers import weights as weights_module
from minivllm.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from minivllm.layers.linear import Linear
from minivllm.layers.platform import Platform
from minivllm.layers.weights import CheckpointTensor
from minivllm.models.weights import load_weights

CPU = torch.device("cpu")
VOCAB_SIZE, HIDDEN_SIZE = 37, 24


class Tied(nn.Module):
    """Nothing but an embedding and its head."""

    fused_layers, ignored_weights, tie_word_embeddings = {}, (), True

    def __init__(self, platform: Platform) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(VOCAB_SIZE, HIDDEN_SIZE, platform)
        self.lm_head = ParallelLMHead(HIDDEN_SIZE, VOCAB_SIZE, platform, self.embed_tokens)


WAYS = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "int8": {"quantization": "int8"},
    "int8 and bfloat16": {"quantization": "int8", "dtype": torch.bfloat16},
    "unpacked": {},
    "unpacked bfloat16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_tied_embedding_and_its_head_hold_one_weight(way, monkeypatch):
    if "unpacked" in way:
        monkeypatch.setattr("minivllm.layers.platform.PACKED_WEIGHTS", {})
    monkeypatch.setattr(weights_module, "ROWS_AT_A_TIME", 16)  # 37 rows are three pieces
    platform = Platform(CPU, **{"dtype": torch.float32, **WAYS[way]})
    torch.set_default_dtype(platform.activation_dtype)  # as `load_model` does
    try:
        model = Tied(platform)
    finally:
        torch.set_default_dtype(torch.float32)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    load_weights(model, iter([("embed_tokens.weight", weight)]), "model")
    if "int8" in way:  # rounded once, also where the cache is bfloat16
        expected = reference.restore_weight(*reference.round_weight(weight), HIDDEN_SIZE)
    else:
        expected = weight.to(platform.dtype).float()

    token_ids = torch.tensor([3, 36, 0, 3])
    rows = model.embed_tokens(token_ids)
    assert rows.dtype == platform.activation_dtype
    torch.testing.assert_close(rows.float(), expected[token_ids], rtol=0, atol=0)
    logits = model.lm_head(rows)
    tolerance = {} if platform.dtype == torch.float32 and "int8" not in way else {"rtol": 0.02, "atol": 0.2}
    torch.testing.assert_close(logits.float(), expected[token_ids] @ expected.t(), **tolerance)

    if "unpacked" in way:
        assert model.embed_tokens.weight is model.lm_head.weight
    else:
        assert not list(model.parameters())


def test_a_tied_embedding_of_the_wrong_shape_is_told():
    weight = torch.zeros(VOCAB_SIZE + 1, HIDDEN_SIZE)
    with pytest.raises(ModelLoadError, match=r"embed_tokens.weight has shape \[38, 24\], but the config asks for \[37, 24\]"):
        load_weights(Tied(Platform(CPU, torch.float32)), iter([("embed_tokens.weight", weight)]), "model")


@pytest.mark.long
@pytest.mark.skipif("avx512vnni" in os.environ.get("MINIVLLM_CPU_FEATURES", ""), reason="is in such a process already")
def test_the_same_without_the_instruction_for_8_bits():
    environment = os.environ | {"MINIVLLM_CPU_FEATURES": "-avx512vnni"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_what_somebody_elses_layer_makes_of_its_parts_is_made_when_they_are_complete():
    class Layer(nn.Module):
        fused_layers, ignored_weights, tie_word_embeddings = {}, (), False

        def __init__(self, platform: Platform) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(2), requires_grad=False)
            self.linear = Linear(2, 16, False, platform)

        def process_weights_after_loading(self) -> None:
            self.found = self.linear.method.packed

    layer = Layer(Platform(CPU, torch.float32))
    load_weights(layer, iter([("scale", torch.ones(2)), ("linear.weight", torch.ones(16, 2))]), "model")
    assert layer.found is not None


def test_freed_memory_is_returned_while_the_model_is_loaded(monkeypatch, smollm2_path):
    calls = []
    monkeypatch.setattr("minivllm.models.weights.return_freed_memory", lambda: calls.append(1))
    LLM(str(smollm2_path), max_num_seqs=1, max_model_len=64, num_gpu_blocks_override=8)
    assert len(calls) > 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_packed_weights_are_read_straight_into_their_form_or_from_a_parameter(monkeypatch, dtype, has_bias):
    """A checkpoint's, in pieces; those of a model that fills its parameters itself, from there."""
    monkeypatch.setattr(weights_module, "ROWS_AT_A_TIME", 7)
    widths, platform = [21, 11, 16], Platform(CPU, dtype)
    weight, bias, x = torch.randn(48, 10), torch.randn(48), torch.randn(3, 10)
    read, filled = (Linear(10, widths, has_bias, platform) for _ in range(2))
    parameter = read.weight
    for shard, (rows, numbers) in enumerate(zip(weight.split(widths), bias.split(widths), strict=True)):
        read.load_weight(read.weight, CheckpointTensor("model", "weight", rows), shard)
        if has_bias:
            read.load_weight(read.bias, CheckpointTensor("model", "bias", numbers), shard)
    assert not parameter.any(), "nobody has written to it"
    with pytest.raises(RuntimeError):
        parameter.data.mul_(2)  # it would be lost
    assert filled.weight.dtype == dtype
    filled.weight.data.copy_(weight)
    if has_bias:
        filled.bias.data.copy_(bias)
    for layer in (read, filled):
        layer.process_weights_after_loading()
        assert layer.weight is None and layer.bias is None
    assert torch.equal(read(x), filled(x))
    torch.testing.assert_close(read(x), nn.functional.linear(x, weight, bias if has_bias else None), rtol=0.02, atol=0.05)


def test_memory_is_taken_page_by_page_and_given_back():
    def resident():
        return psutil.Process().memory_info().rss

    before = resident()
    zeros = zero_pages((64, 2**20), torch.float32)
    assert resident() < before + 2**25
    zeros[:32] = 1
    assert resident() > before + 2**26 and zeros[32:].sum() == 0
    del zeros
    assert resident() < before + 2**25
    assert zero_pages((0, 3), torch.bfloat16).shape == (0, 3)


def test_tensors_on_shared_pages_are_apart_and_given_back():
    def resident():
        return psutil.Process().memory_info().rss

    pages, before = SharedPages(), resident()
    shapes = [(3, 5), (LARGE_BYTES // 4 - 1,), (1,), (7, 2**16), (LARGE_BYTES,), (2, 2**18 + 3), (0, 3)] * 8
    tensors = [pages.zeros(shape, dtype) for shape in shapes for dtype in (torch.float32, torch.int8)]
    assert sum(tensor.nbytes for tensor in tensors) > 3 * SHARED_BYTES
    for i, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0 and tensor.is_contiguous() and not tensor.any()
        tensor.fill_(i + 1)
    for i, tensor in enumerate(tensors):
        assert (tensor == i + 1).all()
    assert resident() > before + 3 * SHARED_BYTES
    del tensor, tensors
    assert resident() < before + SHARED_BYTES


def test_pages_are_not_shared_where_there_is_no_room_for_so_many(monkeypatch):
    def map_little(descriptor, length, **options):
        if length >= SHARED_BYTES:
            raise OSError("Cannot allocate memory")
        return mmap.mmap(descriptor, length, **options)

    monkeypatch.setattr("minivllm.kernels.pages.mmap", SimpleNamespace(**{**vars(mmap), "mmap": map_little}))
    assert SharedPages().zeros((4, 1024), torch.float32).sum() == 0
    with pytest.raises(MemoryError, match="The system has no"):
        SharedPages().zeros((SHARED_BYTES,), torch.float32)


def test_a_c_library_that_keeps_freed_memory_is_no_error(monkeypatch):
    return_freed_memory()
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    return_freed_memory()


def test_a_head_may_be_tied_to_an_embedding_of_torch():
    class TiedToTorch(Tied):
        def __init__(self, platform: Platform) -> None:
            super().__init__(platform)
            self.embed_tokens = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
            self.lm_head = ParallelLMHead(HIDDEN_SIZE, VOCAB_SIZE, platform, self.embed_tokens)

    model, weight = TiedToTorch(Platform(CPU, torch.float32)), torch.randn(VOCAB_SIZE, HIDDEN_SIZE)
    load_weights(model, iter([("embed_tokens.weight", weight)]), "model")
    torch.testing.assert_close(model.embed_tokens.weight.data, weight, rtol=0, atol=0)
    torch.testing.assert_close(model.lm_head(torch.eye(HIDDEN_SIZE)), weight.t())


def test_an_embedding_of_its_own_keeps_its_weight():
    embedding = VocabParallelEmbedding(VOCAB_SIZE, HIDDEN_SIZE, Platform(CPU, torch.bfloat16))
    embedding.weight.data.normal_()
    embedding.process_weights_after_loading()
    rows = embedding(torch.tensor([5]))
    assert rows.dtype == torch.float32 and torch.equal(rows[0], embedding.weight[5].float())
