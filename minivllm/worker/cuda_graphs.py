"""Steps as CUDA graphs: captured once for some sizes, then replayed.

A step launches hundreds of kernels. Those of a decode are so short that launching one from Python takes longer than running it, and so are
those of a short prompt, or of a chunk beside decodes. A graph launches them all at once. It repeats exactly what was recorded, on the same memory, so a
step's inputs go to fixed buffers, and it is padded to the next recorded size. A padding row writes to no slot.
Mirrors `vllm/v1/worker/gpu/cudagraph_utils.py`.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from minivllm.errors import ConfigError
from minivllm.kernels.checks import Checks
from minivllm.kernels.ops import Ops, load_platform_kernels
from minivllm.layers.attention import AttentionMetadata, KVCache
from minivllm.layers.embedding import ParallelLMHead
from minivllm.models.base import CausalLM
from minivllm.worker.model_input import GraphSize, ModelInput
from minivllm.worker.transfer import pack_to_device, packed_bytes

MAX_DECODES, MAX_TOKENS = 512, 1024
"""Larger decode steps, and larger steps with prompts, are not captured: their kernels take long enough to hide their launches."""

MAX_LOGITS_SIZE = 64
"""Graphs of at most so many decodes compute logits, too. Larger steps hide one more launch, and the logits of each size take memory of their own."""


def graph_sizes(max_num_seqs: int, max_num_tokens: int) -> list[GraphSize]:
    """The sizes that graphs are captured for, from small to large.

    Decodes: 1, 2, 4, multiples of 8, and the largest batch there can be. Steps with prompts: from 32 tokens up to the most of a step. Small sizes are
    half as large again as the one before; large ones lie closer, because computing padding costs more there than launching kernels.
    """
    most_decodes, most_tokens = min(max_num_seqs, MAX_DECODES), min(max_num_tokens, MAX_TOKENS)
    decodes = {size for size in (1, 2, 4, *range(8, most_decodes, 8)) if size < most_decodes} | {most_decodes}
    candidates = (32, 48, 64, 96, 128, 192, *range(256, 512, 64), *range(512, MAX_TOKENS, 128))
    tokens = {size for size in candidates if size < most_tokens} | {most_tokens}
    return sorted([GraphSize(size, True) for size in decodes] + [GraphSize(size, False) for size in tokens])


class StaticInputs:
    """Memory at fixed addresses for the inputs of a step of up to `max_tokens` tokens and `max_num_seqs` sequences, of up to `max_blocks` blocks each.

    A step comes in one copy, packed as tightly as it is (`receive`), and then a kernel spreads it over the rows (`unpack`). That kernel is the
    first one of each graph, so a replay needs one copy and one launch. Copies and replays are queued on one stream: the next step's
    copy waits until the graph of this step has run.

    Attributes:
        packed: The step as it came from the host, bytes.
        ops: With the operation that unpacks it.
    """

    def __init__(self, max_tokens: int, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        numbers, table = max_tokens * 8, max_num_seqs * max_blocks * 4
        sizes = [16, numbers, numbers, numbers, max_num_seqs * 4, table, max_num_seqs * 4 + 4]  # what `receive` packs
        self.packed = torch.zeros(packed_bytes(sizes)[-1], dtype=torch.uint8, device=device)
        self.ops = Ops(load_platform_kernels(device), Checks.NONE)
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.slot_mapping = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self.context_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.query_start_loc = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)

    def view(self, size: GraphSize) -> ModelInput:
        """The rows of a graph: as many sequences as tokens for a decode, otherwise all sequences that there may be."""
        num_tokens = size.num_tokens
        num_seqs = num_tokens if size.is_decode else len(self.context_lens)
        metadata = AttentionMetadata(
            is_decode=size.is_decode,
            slot_mapping=self.slot_mapping[:num_tokens],
            block_tables=self.block_tables[:num_seqs],
            context_lens=self.context_lens[:num_seqs],
            query_start_loc=self.query_start_loc[: num_seqs + 1],
        )
        return ModelInput(self.input_ids[:num_tokens], self.positions[:num_tokens], metadata, [], size)

    def receive(self, arrays: list[np.ndarray]) -> list[Tensor]:
        """Copy a step to the device, without waiting. Returns the arrays as parts of `packed`, which may still be written to.

        Args:
            arrays: Input ids, positions and slots, `[num_tokens]` int64; context lengths, `[num_seqs]`, block tables, `[num_seqs, blocks]`, and
                where the sequences begin, `[num_seqs + 1]`, int32.
        """
        header = np.array([len(arrays[0]), *arrays[4].shape, 0], np.int32)
        return pack_to_device([header, *arrays], self.packed.device, out=self.packed)[1:]

    def unpack(self, size: GraphSize) -> ModelInput:
        """Spread the step over a graph's rows, and make the others padding: tokens without a slot, sequences without tokens."""
        inputs = self.view(size)
        metadata = inputs.metadata
        of_tokens = inputs.input_ids, inputs.positions, metadata.slot_mapping
        self.ops.unpack_inputs(self.packed, *of_tokens, metadata.context_lens, metadata.block_tables, metadata.query_start_loc)
        return inputs


class StepGraphs:
    """Captures a model's steps over one cache, and replays them.

    Args:
        max_num_seqs, max_num_tokens: The most sequences and tokens of a step.
        max_blocks: The most blocks of a sequence.
        with_logits: Whether graphs may compute logits.

    Attributes:
        sizes: Those of `graph_sizes`.
        outputs: Of each captured size, the hidden states, `[num_tokens, hidden_size]`.
        logits: Of decodes up to `MAX_LOGITS_SIZE`, if the model has a head of this package: `[num_tokens, vocab_size]`.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_caches: list[KVCache],
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks: int,
        device: torch.device,
        with_logits: bool = True,
    ) -> None:
        self.model = model
        self.with_logits = with_logits
        self.kv_caches = kv_caches
        self.sizes = graph_sizes(max_num_seqs, max_num_tokens)
        self.inputs = StaticInputs(self.sizes[-1].num_tokens, min(max_num_seqs, MAX_DECODES), max_blocks, device)
        self.graphs: dict[GraphSize, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[GraphSize, Tensor] = {}
        self.logits: dict[GraphSize, Tensor] = {}
        self.pool: Any = None

    @torch.inference_mode()
    def capture(self, sizes: list[GraphSize] | None = None) -> None:
        """Capture one graph for each of these sizes (None: all), from the largest down, so that smaller ones reuse its memory.

        Raises:
            ConfigError: The GPU has too little memory left, or the model does what cannot be captured.
        """
        sizes = sorted(sizes or self.sizes, reverse=True)
        try:
            for size in tqdm(sizes, desc="Capturing CUDA graphs", disable=len(sizes) == 1 or sys.stderr is None):
                self._forward(size)  # compiles the kernels, which cannot be done while capturing
                torch.cuda.synchronize()
                self._capture(size)
        except RuntimeError as error:  # torch.cuda.OutOfMemoryError, or what CUDA says while capturing
            if "out of memory" not in str(error):
                raise
            raise ConfigError(
                "The GPU has too little memory left for CUDA graphs: lower gpu_memory_utilization, max_num_seqs or "
                "max_num_batched_tokens, or set enforce_eager=True."
            ) from None

    def _capture(self, size: GraphSize) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                self._keep(size, *self._forward(size))
        except RuntimeError as error:
            if "out of memory" in str(error):
                raise
            raise ConfigError(
                f"A step could not be captured as a CUDA graph ({str(error).splitlines()[0]}): a model or an attention backend must not "
                f"wait for the GPU or read a tensor back. Set enforce_eager=True, or let the backend's supports_cuda_graphs return False."
            ) from error
        self.pool = graph.pool()
        self.graphs[size] = graph

    def find_size(self, num_tokens: int, num_seqs: int, num_blocks: int) -> GraphSize | None:
        """The graph for a step of so many tokens and sequences, with block tables so wide; None if no graph is large enough."""
        if num_seqs > len(self.inputs.context_lens) or num_blocks > self.inputs.block_tables.shape[1]:
            return None
        is_decode = num_tokens == num_seqs
        return next((size for size in self.sizes if size.is_decode == is_decode and size.num_tokens >= num_tokens), None)

    def run(self, inputs: ModelInput) -> Tensor:
        """Hidden states of the step that `inputs` has received, `[num_tokens, hidden_size]`; overwritten by the next one."""
        assert inputs.graph_size is not None
        self.graphs[inputs.graph_size].replay()
        return self.outputs[inputs.graph_size][: len(inputs.input_ids)]

    def get_logits(self, inputs: ModelInput) -> Tensor | None:
        """Logits of all rows of the step that was run last, `[num_tokens, vocab_size]`, overwritten by the next one; None if its graph has none."""
        logits = None if inputs.graph_size is None else self.logits.get(inputs.graph_size)
        return None if logits is None or not has_own_head(self.model) else logits[: len(inputs.input_ids)]

    def kept_bytes(self) -> int:
        """Bytes of the hidden states and logits that all sizes will keep, once the smallest size has been captured."""
        hidden = max((hidden[0].nbytes for hidden in self.outputs.values()), default=0)
        logits = max((logits[0].nbytes for logits in self.logits.values()), default=0)
        return sum(size.num_tokens * (hidden + (logits if _has_logits(size) else 0)) for size in self.sizes)

    def _keep(self, size: GraphSize, hidden: Tensor, logits: Tensor | None) -> None:
        self.outputs[size] = hidden
        if logits is not None:
            self.logits[size] = logits

    def _forward(self, size: GraphSize) -> tuple[Tensor, Tensor | None]:
        inputs = self.inputs.unpack(size)
        hidden = self.model.forward(inputs.input_ids, inputs.positions, self.kv_caches, inputs.metadata)
        assert isinstance(hidden, Tensor), "a pipeline stage captures no graphs"
        has_logits = self.with_logits and _has_logits(size) and has_own_head(self.model)
        return hidden, self.model.compute_logits(hidden) if has_logits else None


def _has_logits(size: GraphSize) -> bool:
    return size.is_decode and size.num_tokens <= MAX_LOGITS_SIZE


def has_own_head(model: CausalLM) -> bool:
    """Whether the model computes logits as this package does, of the whole vocabulary on this rank. What a user has put in its place may wait for
    the GPU, which cannot be captured."""
    is_own = type(model).compute_logits.__module__.startswith("minivllm.models.") and "compute_logits" not in vars(model)
    head = getattr(model, "lm_head", None)
    is_plain = type(head) is ParallelLMHead and not head._forward_hooks and not head._forward_pre_hooks
    return is_own and is_plain and model.choose is None
