"""GGUF files: converted once to an ordinary Hugging Face folder in the cache.

GGUF packs weights (often quantized), config and tokenizer into one file. Parsing it and unpacking the weights takes
seconds, so it is done once for each file; from then on the model loads like any other. The format is llama.cpp's; the
`gguf` package reads it and unpacks the quantized blocks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from minivllm.errors import ModelLoadError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

logger = logging.getLogger(__name__)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",  # Mistral, too
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}
"""GGUF architecture, which is also the `model_type` of transformers, to its name in config.json."""

PERMUTED = ("llama", "smollm3")
"""Architectures whose rows of queries and keys llama.cpp has in another order than Hugging Face."""

CONFIG_NAMES = {
    "{}.context_length": "max_position_embeddings",
    "{}.embedding_length": "hidden_size",
    "{}.block_count": "num_hidden_layers",
    "{}.feed_forward_length": "intermediate_size",
    "{}.attention.head_count": "num_attention_heads",
    "{}.attention.head_count_kv": "num_key_value_heads",
    "{}.attention.key_length": "head_dim",
    "{}.attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "{}.attention.sliding_window": "sliding_window",
    "{}.vocab_size": "vocab_size",
    "{}.rope.scaling.original_context_length": "original_max_position_embeddings",
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.unknown_token_id": "unk_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
"""GGUF field, with the architecture for {}, to its name in config.json."""

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""They hold a divisor of each frequency, and become settings in config.json."""

CONVERSION_VERSION = 2
"""To be incremented when the conversion changes, so that folders of older versions are not used."""


def cache_folder() -> Path:
    """Where converted models are kept: $MINIVLLM_CACHE, or minivllm under the user's cache folder."""
    if folder := os.environ.get("MINIVLLM_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minivllm"


def find_conversion(file: Path) -> Path:
    """The folder for the conversion of a GGUF file, whether it exists or not. A file that has changed gets another folder."""
    stat = file.stat()
    key = f"{CONVERSION_VERSION}-{file.resolve()}-{stat.st_size}-{stat.st_mtime_ns}"
    return cache_folder() / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def convert_gguf(file: Path) -> Path:
    """The folder with config.json, tokenizer and float32 safetensors made from a GGUF file, now if it does not exist.

    Raises:
        ModelLoadError: The file is damaged, or its architecture or quantization is not supported.
    """
    folder = find_conversion(file)
    if folder.exists():
        return folder
    logger.warning("Converting %s, once; it takes some seconds.", file.name)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        message = f"The model cache {folder.parent} cannot be made ({error}): set MINIVLLM_CACHE to another folder."
        raise ModelLoadError(message) from None
    # Converted in a temporary folder and then renamed, so that an interrupted conversion leaves nothing that looks complete.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        try:
            _convert(file, made)
        except ModelLoadError:
            raise
        except Exception as error:  # a damaged file raises something different in each library
            reason = f"{type(error).__name__}: {error}".split("\n")[0]
            raise ModelLoadError(f"{file} cannot be converted ({reason}): it is damaged or unsupported, get it again.") from error
        try:
            made.rename(folder)
        except OSError:
            if not folder.exists():  # another process was faster
                raise
    return folder


def _convert(file: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        reader = GGUFReader(file)
        field = reader.get_field("general.architecture")
        architecture = str(field.contents()) if field else "unnamed"
        tensors = list(reader.tensors)
    except Exception as error:  # the reader raises anything
        raise ModelLoadError(f"{file} cannot be read as GGUF ({error}): it is damaged or cut off, get it again.") from error
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise ModelLoadError(f"{file.name} holds a {architecture!r} model, which is not supported: supported are {supported}.")
    config = _read_config(file, reader, architecture)
    config["architectures"] = [ARCHITECTURES[architecture]]
    config["tie_word_embeddings"] = not any(tensor.name == "output.weight" for tensor in tensors)
    num_kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    names = _checkpoint_names(architecture, num_layers=min(config["num_hidden_layers"], len(tensors)))
    weights = {}
    for tensor in tensors:
        if tensor.name in ROPE_TENSORS:
            continue
        if tensor.name not in names:
            raise ModelLoadError(f"{file.name} has a tensor {tensor.name!r} that a {architecture} model has no place for.")
        array = _unpack(file, tensor)
        if architecture in PERMUTED:
            if ".attn_q." in tensor.name:
                array = _unpermute(array, config["num_attention_heads"])
            elif ".attn_k." in tensor.name:
                array = _unpermute(array, num_kv_heads)
        weights[names[tensor.name]] = torch.from_numpy(np.array(array, order="C"))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # transformers knows the tokenizers of all architectures, but AutoTokenizer asks for the config first, and it knows no GGUF of SmolLM3.
    tokenizer_cls = PreTrainedTokenizerFast if architecture == "smollm3" else AutoTokenizer
    tokenizer_cls.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def _read_config(file: Path, reader: GGUFReader, architecture: str) -> dict[str, Any]:
    """The config.json that transformers would write, but for what the tensors tell."""
    from transformers import AutoConfig

    def read(name: str) -> Any:
        field = reader.get_field(name)
        return None if field is None else field.contents()

    values = {name: read(key.format(architecture)) for key, name in CONFIG_NAMES.items()}
    config = {name: value for name, value in values.items() if value is not None}
    config.setdefault("vocab_size", len(read("tokenizer.ggml.tokens")))
    config["sliding_window"] = config.get("sliding_window") or None  # 0 says that there are none
    head_dim = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    rope = {"rope_theta": read(f"{architecture}.rope.freq_base") or 10000.0, "rope_type": "default"}
    num_rotated = read(f"{architecture}.rope.dimension_count") or head_dim
    if num_rotated != head_dim:
        rope["partial_rotary_factor"] = num_rotated / head_dim
    config["rope_parameters"] = rope | _read_rope_scaling(file, reader, architecture, config["max_position_embeddings"])
    return AutoConfig.for_model(architecture, **config).to_dict()


def _read_rope_scaling(file: Path, reader: GGUFReader, architecture: str, length: int) -> dict[str, Any]:
    """How the rotary frequencies are stretched, as in config.json: nothing if they are not.

    A tensor of divisors is what "longrope" has, and serves for Llama 3.1 as well: there, it is the same list at any length.
    """
    prefix = f"{architecture}.rope.scaling."
    scaling = {name.removeprefix(prefix): field.contents() for name, field in reader.fields.items() if name.startswith(prefix)}
    scaling_type, factor = scaling.pop("type", "none"), scaling.pop("factor", 0.0)
    original = scaling.pop("original_context_length", length)
    scaling.pop("finetuned", None)
    divisors = {tensor.name: _unpack(file, tensor).tolist() for tensor in reader.tensors if tensor.name in ROPE_TENSORS}
    scale = scaling.pop("attn_factor", None) if divisors else None
    if scaling or scaling_type not in ("none", "linear", "yarn", "longrope"):
        told = ", ".join(scaling) or repr(scaling_type)
        raise ModelLoadError(f"{file.name} stretches its rotary frequencies ({told}), unsupported in GGUF: use its safetensors.")
    if "rope_freqs.weight" in divisors:
        both = dict.fromkeys(("short_factor", "long_factor"), divisors["rope_freqs.weight"])
        return both | {"rope_type": "longrope", "attention_factor": 1.0, "original_max_position_embeddings": length}
    if divisors:
        lists = {f"{kind}_factor": divisors.get(f"rope_factors_{kind}.weight") for kind in ("short", "long")}
        return lists | {"rope_type": "longrope", "attention_factor": scale, "original_max_position_embeddings": original}
    if scaling_type == "yarn":
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return {"rope_type": "linear", "factor": factor} if scaling_type == "linear" else {}


def _checkpoint_names(architecture: str, num_layers: int) -> dict[str, str]:
    """GGUF tensor name to the name in a Hugging Face checkpoint."""
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    layer_names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    if architecture == "qwen3":
        layer_names |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    if architecture == "phi3":  # both have queries, keys and values fused, and so gate and up projection
        layer_names |= {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    for i in range(num_layers):
        for gguf_name, name in layer_names.items():
            for kind in ("weight", "bias"):
                names[f"blk.{i}.{gguf_name}.{kind}"] = f"model.layers.{i}.{name}.{kind}"
    return names


def _unpack(file: Path, tensor: ReaderTensor) -> np.ndarray:
    """A tensor's values in float32, with torch's order of dimensions."""
    from gguf.quants import dequantize

    try:
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError:
        raise ModelLoadError(
            f"{file.name} has weights in {tensor.tensor_type.name}, which cannot be unpacked: "
            f"get a version in F16, Q8_0, Q4_0, Q4_1 or a K-quant."
        ) from None


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of the rows of query and key weights, which pairs adjacent channels for RoPE."""
    rows = weight.shape[0]
    return weight.reshape(num_heads, rows // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)
