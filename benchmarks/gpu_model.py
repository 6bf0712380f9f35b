"""Models of known sizes, for benchmarks on a machine where none is at hand: a config and a tokenizer; `load_format="dummy"` makes the weights.

Nothing is fetched: a machine with a GPU that is lent for some minutes may have no network.
"""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
}  # fmt: skip
"""The sizes of Qwen3-0.6B."""
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip
"""The sizes of SmolLM2-135M."""
TINY = QWEN3 | {
    "vocab_size": 4096, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
}  # fmt: skip
"""To rehearse a benchmark on a CPU."""


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Write the config, and a tokenizer with a text for each token id."""
    folder.mkdir(parents=True, exist_ok=True)
    model_type = config["architectures"][0].removesuffix("ForCausalLM").lower()
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type, "eos_token_id": 0}))
    make_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "model_max_length": 2**20}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def make_tokenizer(vocab_size: int) -> Any:
    """A byte-level BPE as models have, whose tokens are all bytes, all pairs of letters, and pairs of those."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs = [a + b for a, b in itertools.product(string.ascii_lowercase, repeat=2)]
    merges = [(pair[0], pair[1]) for pair in pairs] + list(itertools.product(pairs, repeat=2))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = merges[: vocab_size - 1 - len(alphabet)]
    vocab = {token: i for i, token in enumerate(["<eos>", *alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


def count_parameters(config: dict[str, Any]) -> tuple[int, int]:
    """Of a layer's matrices, and of the embedding, which is the head as well."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer = hidden * (queries + 2 * keys) + queries * hidden + 3 * hidden * config["intermediate_size"]
    return layer, config["vocab_size"] * hidden
