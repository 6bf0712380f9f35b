"""Folders of tiny models: a config, a tokenizer of a hundred words and, if wanted, weights; and one that looks like a download."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 120, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}  # fmt: skip
"""120 rows for 100 words."""
WORDS = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, 100))]


def make_folder(path: Path, **changes: Any) -> Path:
    """A model without weights."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | changes))
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    write_tokenizer_config(path)
    return path


def write_tokenizer_config(folder: Path, **settings: Any) -> None:
    """A tokenizer_config.json with these settings, too."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "unk_token": "<unk>"} | settings))


def write_weights(folder: Path) -> None:
    """Random weights for the config."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    save_file(
        {name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors", {"format": "pt"}
    )


def lay_out_download(source: Path, cache: Path, name: str, commit: str) -> Path:
    """A copy of a folder as huggingface_hub keeps it: links to files that are named by their content. Returns the folder of links."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    for made in (snapshot, blobs, repository / "refs"):
        made.mkdir(parents=True)
    (repository / "refs/main").write_text(commit)
    for file in source.iterdir():
        blob = blobs / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot
