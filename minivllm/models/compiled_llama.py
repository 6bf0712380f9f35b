"""`LlamaModel.forward` in compiled kernels, on a CPU; `LLM(enforce_eager=True)` runs it as it is written.

A small model's decode step is hundreds of short kernels, and Python takes about as long to launch one as the processor takes to run it. So
`kernels.cpu.decoder_layer` has the same kernels behind fewer calls:

- all layers, of the model or of a pipeline stage, and the last norm as one call, where they are alike and a single rank has them;
- otherwise each half of a layer, attention up to `o_proj` and the MLP up to `down_proj`, as one call. Between two of them the ranks of
  a tensor-parallel group sum their results. A half that has no compiled form runs as it is written: attention with normalized
  queries and keys (Qwen3), with some channels rotated alone (Phi-4-mini), or with a backend of the user's own.

The numbers are the same to the last bit. A part that a user has replaced, subclassed or hooked is called, as in any model: before each step
`CompiledLlama` checks that the model is still what it was compiled from, and otherwise leaves the step to the model.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor, nn

from minivllm.distributed.pipeline import IntermediateTensors
from minivllm.errors import KernelError
from minivllm.layers.attention import AttentionMetadata, KVCache
from minivllm.layers.attention_backends import CPUAttentionBackend
from minivllm.layers.linear import Linear, MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from minivllm.layers.norm import RMSNorm
from minivllm.layers.platform import Platform
from minivllm.layers.rotary import RotaryEmbedding
from minivllm.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel
from minivllm.models.stages import own_layers

logger = logging.getLogger(__name__)

AllReduce = Callable[[Tensor], Tensor]

PLAIN = {
    LlamaDecoderLayer, LlamaAttention, LlamaMLP, RMSNorm, RotaryEmbedding, QKVParallelLinear, MergedColumnParallelLinear,
    RowParallelLinear, nn.ModuleList,
}  # fmt: skip
"""The classes whose forward methods the kernels know. A subclass may do something else."""


def compile_model(model: nn.Module, platform: Platform) -> CompiledLlama | None:
    """Let compiled kernels do the work of a loaded model's layers, where there are any.

    Returns:
        What replaces the `forward` of `model.model` from now on. None if the model runs as it is written: it is not a Llama, is on a GPU,
        or its weights are not packed.
    """
    decoder = getattr(model, "model", None)
    if type(decoder) is not LlamaModel or not hasattr(platform.kernels, "decoder_layers"):
        return None
    compiled = CompiledLlama(decoder, platform)
    if not any(chain.from_iterable(compiled.halves)):
        return None
    decoder.forward = compiled
    backend = type(own_layers(decoder.layers)[0].self_attn.backend)
    if issubclass(backend, CPUAttentionBackend) and backend.forward is not CPUAttentionBackend.forward:
        logger.warning(
            "%s has a forward of its own, which is called instead of the compiled attention: steps are slower.", backend.__name__
        )
    return compiled


class CompiledLlama:
    """Called like `LlamaModel.forward`, which it stands in for.

    Args:
        model: With its weights.
        platform: What the model was made with.

    Attributes:
        halves: The compiled halves of each layer, attention and MLP; None for one that runs as it is written.
        all_layers: All of them as one call, where possible.
    """

    def __init__(self, model: LlamaModel, platform: Platform) -> None:
        self.model, self.platform = model, platform
        self.has_changed: Callable[[], bool] = lambda: True
        if "_modules" in vars(model):  # if not, a copy is being made, and is compiled when it is complete
            self._compile()

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledLlama:
        """A copy of the model has weights of its own, at other addresses."""
        return CompiledLlama(copy.deepcopy(self.model, memo), self.platform)

    def describe(self) -> str:
        """How the layers run, in words."""
        if self.all_layers is not None:
            return "all layers in one compiled call"
        compiled = {
            kind for pair in self.halves for kind, half in zip(("attention", "MLP"), pair, strict=True) if half is not None
        }
        if not compiled:
            return "as written"
        return f"layer by layer, {' and '.join(sorted(compiled, key=str.lower))} compiled"

    def __call__(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:  # fmt: skip
        """See `LlamaModel.forward`.

        Raises:
            KernelError: The caches are not alike, or not one for each layer.
        """
        if self.has_changed():
            self._compile()
        model = self.model
        if not self.halves:
            return LlamaModel.forward(model, input_ids, positions, kv_caches, metadata, intermediate_tensors)
        if intermediate_tensors is None:
            x, residual = model.embed_tokens(input_ids), None
        else:
            x, residual = intermediate_tensors["hidden_states"], intermediate_tensors["residual"]
        if self.all_layers is not None:
            x, residual = self.all_layers(x, residual, positions, kv_caches, metadata)
        else:
            x, residual = self._run_layers(x, residual, positions, kv_caches, metadata)
        return x if residual is None else IntermediateTensors({"hidden_states": x, "residual": residual})

    def _run_layers(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor | None]:
        """One after the other, and the last norm, if this stage has it. Returns as `CompiledLayers`."""
        model = self.model
        for layer, (attention, mlp), kv_cache in zip(own_layers(model.layers), self.halves, kv_caches, strict=True):
            if attention is not None:
                x, residual = attention(x, residual, positions, kv_cache, metadata)
            else:
                x, residual = layer.input_layernorm.add_and_norm(x, residual)
                x = layer.self_attn(x, positions, kv_cache, metadata)
            if mlp is not None:
                x, residual = mlp(x, residual)
            else:
                x, residual = layer.post_attention_layernorm.add_and_norm(x, residual)
                x = layer.mlp(x)
        return (model.norm.add_and_norm(x, residual)[0], None) if model.stage.is_last else (x, residual)

    def _compile(self) -> None:
        """Find out what can be compiled of the model as it is now."""
        kernels = self.platform.kernels
        parts = own_layers([*self.model.layers.modules(), *self.model.norm.modules()])
        self.has_changed = _watch([self.model, *parts])
        self.halves = []
        self.all_layers = None
        if all(_is_plain(part, self.platform) for part in parts):
            self.halves = [
                (_compile_attention(layer, kernels), _compile_mlp(layer, kernels)) for layer in own_layers(self.model.layers)
            ]
            if self.platform.group.world_size == 1:
                norm = self.model.norm if self.model.stage.is_last else None
                self.all_layers = CompiledLayers.of(self.halves, norm, kernels)


def _is_plain(part: nn.Module, platform: Platform) -> bool:
    """Whether its forward is not overridden, it has no hooks, and it uses the platform's operations."""
    is_hooked = part._forward_hooks or part._forward_pre_hooks
    return type(part) in PLAIN and not is_hooked and getattr(part, "ops", platform.ops) is platform.ops


def _watch(parts: list[nn.Module]) -> Callable[[], bool]:
    """A function that says whether one of the modules has been changed since: its class, hooks, parts, operations or backend.

    It is called before each step, so it takes a few microseconds.
    """
    children = [part._modules for part in parts]
    hooks = [hooks for part in parts for hooks in (part._forward_hooks, part._forward_pre_hooks)]
    tools = [(vars(part), name) for part in parts for name in ("ops", "backend") if name in vars(part)]

    def look() -> list[Any]:
        found = [*chain.from_iterable(map(dict.values, children)), *map(type, parts), *map(len, filter(None, hooks))]
        return [*found, *[attributes[name] for attributes, name in tools]]

    before = look()
    return lambda: look() != before


class CompiledAttention:
    """Norm, attention and output projection of one layer.

    Attributes:
        weights: `AttentionWeights` of the layer.
        settings: Query heads for each KV head, the scale and window of attention, and epsilon of the norm.
        all_reduce: Sums the ranks' results.
    """

    def __init__(self, kernels: Any, weights: Any, settings: tuple[int, float, int, float], all_reduce: AllReduce) -> None:
        self.kernels, self.weights, self.settings, self.all_reduce = kernels, weights, settings, all_reduce

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor]:
        """The previous layer's output and the residual stream (None at the first layer) to attention's output and the stream, to
        which the former was added.
        """
        out, total = self.kernels.attention_block(self.weights, x, residual, positions, kv_cache, metadata, *self.settings)
        return self.all_reduce(out), total


class CompiledMLP:
    """Norm, SwiGLU and down projection of one layer.

    Attributes:
        weights: `MLPWeights` of the layer.
        eps: Of the norm.
        all_reduce: Sums the ranks' results.
    """

    def __init__(self, kernels: Any, weights: Any, eps: float, all_reduce: AllReduce) -> None:
        self.kernels, self.weights, self.eps, self.all_reduce = kernels, weights, eps, all_reduce

    def __call__(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Attention's output and the residual stream to the MLP's output and the stream, to which the former was added."""
        out, total = self.kernels.mlp_block(self.weights, x, residual, self.eps)
        return self.all_reduce(out), total


Halves = tuple[CompiledAttention | None, CompiledMLP | None]


class CompiledLayers:
    """All layers, and the norm after them, if there is one, in one call.

    Attributes:
        layers: `LayerWeights` of each layer.
        addresses: Where they are, `[num_layers, arrays]`, int64.
        settings: As for the halves.
    """

    def __init__(
        self, kernels: Any, layers: list[Any], norm: RMSNorm | None, settings: tuple[int, float, int, float, float]
    ) -> None:
        self.kernels, self.layers, self.settings = kernels, layers, settings
        self.norm, self.eps = (None, 0.0) if norm is None else (norm.weight.numpy(), norm.eps)
        self.addresses = np.array([[array.ctypes.data for array in layer.arrays()] for layer in layers], np.int64)
        self._checked: list[tuple[int, int]] = []

    @classmethod
    def of(cls, halves: list[Halves], norm: RMSNorm | None, kernels: Any) -> CompiledLayers | None:
        """None unless all halves are compiled, contiguous, and alike in all layers."""
        pairs = [(attention, mlp) for attention, mlp in halves if attention is not None and mlp is not None]
        if not pairs or len(pairs) < len(halves):
            return None
        layers = [kernels.LayerWeights(attention.weights, mlp.weights) for attention, mlp in pairs]
        arrays = [layer.arrays() for layer in layers]
        kinds = {
            (attention.settings, mlp.eps, *((array.dtype.str, array.shape) for array in of_layer))
            for (attention, mlp), of_layer in zip(pairs, arrays, strict=True)
        }
        norms = [] if norm is None else [norm.weight.numpy()]
        are_contiguous = all(array.flags.c_contiguous for array in chain(norms, *arrays))
        if len(kinds) > 1 or not are_contiguous:
            return None
        return cls(kernels, layers, norm, (*pairs[0][0].settings, pairs[0][1].eps))

    def __call__(
        self, x: Tensor, residual: Tensor | None, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor | None]:
        """The hidden states and None; without the norm, what the last layer adds to the residual stream, and the stream. See
        `kernels.cpu.decoder_layers`.
        """
        if len(kv_caches) != len(self.layers):
            raise KernelError(f"There are {len(self.layers)} layers, but {len(kv_caches)} caches.")
        caches = [(key.data_ptr(), value.data_ptr()) for key, value in kv_caches]
        if caches != self._checked:  # mostly, they are those of the step before
            first = kv_caches[0][0]
            for cache in chain.from_iterable(kv_caches):
                if cache.shape != first.shape or cache.dtype != first.dtype or not cache.is_contiguous():
                    raise KernelError("The caches of all layers must be contiguous, and of the same shape and dtype.")
            self._checked = caches
        return self.kernels.decoder_layers(  # type: ignore[no-any-return]
            self.layers[0], self.addresses, self.norm, x, residual, positions, kv_caches[0], np.array(caches, np.int64), metadata,
            *self.settings, self.eps,
        )  # fmt: skip


def _compile_attention(layer: LlamaDecoderLayer, kernels: Any) -> CompiledAttention | None:
    """None if queries are normalized or rotated in part, the backend's `forward` is not that of the CPU backend, or the weights are not packed."""
    norm, attention = layer.input_layernorm, layer.self_attn
    arrays = _packed_arrays(attention.qkv_proj, attention.o_proj)
    backend, rotary = attention.backend, attention.rotary
    if arrays is None or attention.q_norm is not None or type(backend).forward is not CPUAttentionBackend.forward:
        return None
    if not rotary.rotates_all(attention.head_dim):
        return None
    weights = kernels.AttentionWeights(norm.weight.numpy(), *arrays, rotary.cos.numpy(), rotary.sin.numpy())
    settings = (backend.num_heads // backend.num_kv_heads, backend.scale, backend.window, norm.eps)
    return CompiledAttention(kernels, weights, settings, attention.o_proj.group.all_reduce)


def _compile_mlp(layer: LlamaDecoderLayer, kernels: Any) -> CompiledMLP | None:
    """None if the weights are not packed."""
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    arrays = _packed_arrays(mlp.gate_up_proj, mlp.down_proj)
    if arrays is None:
        return None
    return CompiledMLP(kernels, kernels.MLPWeights(norm.weight.numpy(), *arrays), norm.eps, mlp.down_proj.group.all_reduce)


def _packed_arrays(*linears: Linear) -> list[Any] | None:
    """The packed weights as arrays; None if they are not packed, not all alike, or of a width that leaves a panel unfilled."""
    packed = [linear.method.packed for linear in linears]
    if (
        None in packed
        or len({type(weight) for weight in packed}) > 1
        or any(len(weight.bias) > weight.out_features for weight in packed)
    ):
        return None
    return [weight.arrays for weight in packed]
