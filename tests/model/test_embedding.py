"""An embedding gives the rows of its weight, and holds them once where the head is the same weight."""

import pytest
import torch
from torch import nn

from minivllm.kernels import reference
from minivllm.layers.embedding import LMHead, VocabEmbedding
from minivllm.layers.platform import Platform
from minivllm.models.weights import load_weights

CPU = torch.device("cpu")
VOCAB_SIZE, HIDDEN_SIZE = 37, 24


class Tied(nn.Module):
    """Nothing but an embedding and its head."""

    fused_layers, ignored_weights, tie_word_embeddings = {}, (), True

    def __init__(self, platform: Platform) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(VOCAB_SIZE, HIDDEN_SIZE, platform)
        self.lm_head = LMHead(HIDDEN_SIZE, VOCAB_SIZE, platform, self.embed_tokens)


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
    monkeypatch.setattr(Platform, "packs_weights", "unpacked" not in way)
    platform = Platform(CPU, **{"dtype": torch.float32, **WAYS[way]})
    model = Tied(platform)
    weight = torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    load_weights(model, iter([("embed_tokens.weight", weight)]), "model")
    expected = weight
    if "int8" in way:
        rounded, scales = reference.round_weight(weight)
        expected = rounded * scales[:, None]

    token_ids = torch.tensor([3, 36, 0, 3])
    rows = model.embed_tokens(token_ids)
    assert rows.dtype == platform.activation_dtype
    torch.testing.assert_close(rows.float(), expected[token_ids], rtol=0, atol=0)
    logits = model.lm_head(rows)
    torch.testing.assert_close(logits.float(), expected[token_ids] @ expected.t(), rtol=0.02, atol=0.05)

    if "unpacked" in way:
        assert model.embed_tokens.weight is model.lm_head.weight
    else:
        assert not list(model.parameters())


def test_an_embedding_of_its_own_keeps_its_weight():
    embedding = VocabEmbedding(VOCAB_SIZE, HIDDEN_SIZE, Platform(CPU, torch.bfloat16))
    embedding.weight.data.normal_()
    embedding.process_weights_after_loading()
    rows = embedding(torch.tensor([5]))
    assert rows.dtype == torch.float32 and torch.equal(rows[0], embedding.weight[5].float())
