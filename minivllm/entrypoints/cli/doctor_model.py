"""`minivllm doctor MODEL`: what a model's folder says, what it needs, and what fits here, without loading its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.config import EngineArgs, ModelConfig
from minivllm.engine.engine_config import public_name
from minivllm.engine.tokenizer import Tokenizer
from minivllm.entrypoints.cli.serve import limit_steps
from minivllm.errors import MinivllmError
from minivllm.layers.attention_backends import get_attention_backend
from minivllm.layers.linear import Linear
from minivllm.models.base import CausalLM
from minivllm.models.hub import PACKAGED_MODELS, resolve_model
from minivllm.models.registry import load_model_config, load_sampling_defaults, read_json
from minivllm.models.skeleton import build_skeleton, read_headers
from minivllm.models.windows import cache_window
from minivllm.worker.cache_engine import CacheEngine
from minivllm.worker.memory import available_cpu_memory, cpu_cache_bytes, useful_cache_bytes
from minivllm.worker.worker import resolve_device, resolve_dtype

ACTIVATION_COPIES = 8
"""About how many copies of the widest layer's inputs and outputs a step takes for each token, as the engine measures it."""
LOGIT_COPIES = 4
"""About how many copies of the logits sampling takes."""


def examine_model(name: str) -> int:
    """Print what a model is, needs and gets here, one line each, and why it cannot be served if so. Returns 0 if it can be, else 1."""
    try:
        folder = resolve_model(name, with_weights=False)
        read_json(folder / "config.json")
    except MinivllmError as error:
        _line("model", f"NOT FOUND. {error}")
        return 1
    examination = Examination(name, folder)
    examination.print_report()
    print()
    for problem in examination.problems:
        print(f"It cannot be served. {problem}")
    if not examination.problems:
        print(f"It can be served: try `minivllm serve {name}`.")
    return int(bool(examination.problems))


class Examination:
    """What there is to say of a model.

    Args:
        name: As the user gave it.
        folder: Where its files are.

    Attributes:
        problems: Why it cannot be served, a sentence for each reason.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.problems: list[str] = []
        self.is_download = name.lower() not in PACKAGED_MODELS and not Path(name).expanduser().exists()
        self.headers = self._read_headers()
        self.config: ModelConfig | None = self._try(lambda: load_model_config(name, folder))
        if self.config is not None:
            self.config = replace(self.config, name=public_name(name))
        self.model: CausalLM | None = None
        if self.config is not None:
            self.device = resolve_device("auto")
            self.dtype = self._try(lambda: resolve_dtype("auto", self.device, self.config)) or torch.float32
            self.model = self._build(self.headers)
            if self.model is None and self.headers:
                self.model = self._build([])  # weights that do not fit it do not change what it needs

    def _try(self, work: Any) -> Any:
        """What `work` returns; None if it fails, which is a problem."""
        try:
            return work()
        except MinivllmError as error:
            if str(error) not in self.problems:
                self.problems.append(str(error))
            return None

    def _read_headers(self) -> list[tuple[str, Any]]:
        if self.is_download and not any(self.folder.glob("*.safetensors")) and not any(self.folder.glob("*.bin")):
            return []  # serving it downloads them
        return self._try(lambda: read_headers(self.folder)) or []

    def _build(self, headers: list[tuple[str, Any]]) -> CausalLM | None:
        backend = get_attention_backend("auto", self.device)
        return self._try(lambda: build_skeleton(self.config, self.dtype, backend, headers))

    def print_report(self) -> None:
        """Print all lines, and note problems."""
        architectures = read_json(self.folder / "config.json").get("architectures") or ["architecture not named"]
        _line("model", f"{self.name}, {', '.join(map(str, architectures)) if isinstance(architectures, list) else architectures}")
        _line("weights", self._weights())
        if self.config is not None and self.model is not None:
            sizes = [
                (_name(dtype), _size(weight_bytes(self.model, dtype)))
                for dtype in (torch.float32, torch.bfloat16, *([torch.int8] if self.device.type == "cpu" else []))
            ]
            _line("as loaded", ", ".join(f"{size} in {dtype}" for dtype, size in sizes))
            self._print_room(self.config, self.model)
        _line("sampling", self._sampling())
        _line("tokenizer", self._tokenizer())

    def _weights(self) -> str:
        tensors = [tensor for _, tensor in self.headers if isinstance(tensor, Tensor)]
        if tensors:
            stored = ", ".join(sorted({_name(tensor.dtype) for tensor in tensors}))
            text = f"{sum(tensor.numel() for tensor in tensors):,} parameters, stored as {stored}"
            if self.model is not None and self.model.tie_word_embeddings and "lm_head.weight" in dict(self.headers):
                text += "; the config ties the head, which is used if it differs from the embedding"
            return text
        where = "not downloaded yet" if self.is_download else "NONE that can be read (--load-format dummy does without)"
        if self.model is None:
            return where
        return f"{where}; by the config, {sum(parameter.numel() for parameter in self.model.parameters()):,} parameters"

    def _print_room(self, config: ModelConfig, model: CausalLM) -> None:
        args = server_args()
        room = find_room(config, model, self.dtype, self.device, args)
        per_block, block_size = room.block_bytes, args.block_size
        _line(
            "KV cache",
            f"{_size(per_block / block_size)} a token, {_size(per_block)} a block of {block_size}, in {_name(self.dtype)}",
        )
        steps = f"{_size(room.weight_bytes)} of weights in {_name(self.dtype)} and about {_size(room.step_bytes)} for the largest step"
        place = "of the GPU" if self.device.type == "cuda" else "for the CPU"
        _line("memory", f"{_size(room.free_bytes)} free {place}, less {steps}")
        if room.num_blocks < 1:
            advice = advise(config, model, self.dtype, self.device)
            _line("fits here", f"NO. {advice}")
            self.problems.append(f"The memory does not suffice: {advice}")
            return
        num_tokens = room.num_blocks * block_size
        _line("fits here", f"a cache of about {room.num_blocks:,} blocks, {num_tokens:,} tokens")
        if find_room(config, model, self.dtype, self.device, EngineArgs()).num_blocks < 1:  # computes whole prompts at once
            _line("in Python", "LLM(..., enable_chunked_prefill=True), as there is NO ROOM for a step with a whole prompt")
        limit = f"{config.max_model_len:,} tokens"
        if num_tokens >= config.max_model_len:
            at_once = num_tokens // config.max_model_len
            _line("context", f"{limit}; {'one sequence' if at_once == 1 else f'{at_once:,} sequences'} of that length at once")
            return
        scheduler = replace(args.scheduler_config(config.max_model_len), window=cache_window(config))
        if scheduler.may_exceed_cache(num_tokens, block_size):
            _line(
                "context",
                f"{limit}, more than fit, which is enough: blocks behind the windows of {scheduler.window:,} tokens are freed",
            )
            return
        whole = -(-config.max_model_len // block_size) * per_block
        larger = f", and --kv-cache-memory-bytes {whole} gives all of it room" if whole <= room.most_bytes else ""
        _line(
            "context",
            f"{limit}, MORE THAN FIT: longer requests are refused; --max-model-len {num_tokens} says so to clients{larger}",
        )

    def _sampling(self) -> str:
        defaults = self._try(lambda: load_sampling_defaults(self.folder))
        if defaults is None:
            return "generation_config.json CANNOT BE USED"
        ends = (
            f"ends at token {', '.join(map(str, self.config.eos_token_ids))}; "
            if self.config and self.config.eos_token_ids
            else ""
        )
        if not defaults:
            return f"{ends}no defaults of its own"
        return f"{ends}defaults {', '.join(f'{name} {value}' for name, value in defaults.items())} (--generation-config vllm for none)"

    def _tokenizer(self) -> str:
        tokenizer = self._try(lambda: Tokenizer(self.folder))
        if tokenizer is None:
            return "NONE that can be read"
        highest = max(tokenizer.hf_tokenizer.get_vocab().values())
        text = f"{len(tokenizer.hf_tokenizer):,} tokens"
        if self.config is not None:
            rows = self.config.vocab_size
            text += f" for {rows:,} rows of the model"
            if highest >= rows:
                text += f"; prompts with a token from {rows} on are refused, as there is NO ROW for it"
        if not tokenizer.hf_tokenizer.chat_template:
            return f"{text}; NO chat template"
        try:
            tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
        except MinivllmError as error:
            return f"{text}; a chat template that DOES NOT WORK: {error}"
        return f"{text}; a chat template"


@dataclass(frozen=True)
class Room:
    """Bytes that the engine finds, about, and what they are for.

    Attributes:
        free_bytes: Before the weights are loaded.
        weight_bytes: Of the weights, as they are held.
        step_bytes: Of the largest step; an estimate, where the engine measures.
        cache_bytes: What the cache gets by default.
        most_bytes: What it could get.
        block_bytes: Of a block.
    """

    free_bytes: int
    weight_bytes: int
    step_bytes: int
    cache_bytes: int
    most_bytes: int
    block_bytes: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, by default."""
        return max(self.cache_bytes, 0) // self.block_bytes


def find_room(config: ModelConfig, model: CausalLM, dtype: torch.dtype, device: torch.device, args: EngineArgs) -> Room:
    """The memory here, divided as a worker with these arguments divides it (`Worker.determine_num_available_blocks`)."""
    max_model_len, fraction = args.max_model_len or config.max_model_len, args.gpu_memory_utilization
    scheduler = args.scheduler_config(max_model_len)
    weights = weight_bytes(model, torch.int8 if args.quantization == "int8" else dtype)
    max_tokens = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * max_model_len)
    widths = [layer.in_features + sum(layer.out_features) for layer in model.modules() if _is_linear(layer, config)]
    per_row = LOGIT_COPIES * config.vocab_size * torch.float32.itemsize
    per_token = ACTIVATION_COPIES * max(widths, default=0) * (torch.float32 if device.type == "cpu" else dtype).itemsize
    steps = per_token * max_tokens + per_row * min(scheduler.max_num_seqs, max_tokens)
    block_bytes = CacheEngine.block_bytes(config, args.block_size, dtype)
    useful = useful_cache_bytes(scheduler.max_num_seqs, max_model_len, args.block_size, block_bytes)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        most = int(total * fraction) - (total - free) - weights - steps
        return Room(free, weights, steps, min(most, useful), most, block_bytes)
    free = available_cpu_memory()
    most = int((free - weights) * fraction) - steps
    return Room(free, weights, steps, cpu_cache_bytes(free - weights, fraction, steps, useful), most, block_bytes)


def _is_linear(layer: torch.nn.Module, config: ModelConfig) -> bool:
    """Whether it is one of the layers, and not the head."""
    return isinstance(layer, Linear) and layer.whole_out_features != [config.vocab_size]


def weight_bytes(model: CausalLM, dtype: torch.dtype) -> int:
    """Bytes of a model's weights. As int8, each output of a linear layer has a scale, a correction and a bias besides, and all else is float32."""
    if dtype != torch.int8:
        return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    linear = {
        layer.weight: sum(layer.out_features)
        for layer in model.modules()
        if isinstance(layer, Linear) and layer.weight is not None
    }
    others = sum(parameter.numel() for parameter in model.parameters() if parameter not in linear)
    return sum(weight.numel() + 12 * num_outputs for weight, num_outputs in linear.items()) + 4 * others


def advise(config: ModelConfig, model: CausalLM, dtype: torch.dtype, device: torch.device) -> str:
    """The option that makes room for a cache, or how much memory is missing."""
    smaller: list[tuple[str, dict[str, Any]]] = [("--dtype bfloat16", {"dtype": "bfloat16"})]
    if device.type == "cpu":
        smaller.append(("--quantization int8", {"quantization": "int8"}))
        smaller.append(("--quantization int8 --dtype bfloat16", {"quantization": "int8", "dtype": "bfloat16"}))
    for option, arguments in smaller:
        args = server_args(**arguments)
        room = find_room(config, model, resolve_dtype(args.dtype, device, config), device, args)
        if room.num_blocks > 0:
            return f"use {option}, which leaves {room.num_blocks * args.block_size:,} tokens room."
    room = find_room(config, model, dtype, device, server_args())
    return f"free at least {_size(room.block_bytes - room.most_bytes)} more, or take a smaller model."


def server_args(**arguments: Any) -> EngineArgs:
    """The arguments of `minivllm serve` with these options, by default."""
    return limit_steps(EngineArgs(enable_chunked_prefill=True, **arguments))


def _line(label: str, text: str) -> None:
    print(f"{label + ':':<14}{text}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(num_bytes: float) -> str:
    """Bytes with three digits, in the unit that fits."""
    unit = "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1000 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:,.0f} {unit}" if num_bytes >= 100 or unit == "bytes" else f"{num_bytes:.3g} {unit}"
