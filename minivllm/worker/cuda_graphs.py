"""Decode steps as CUDA graphs: captured once for some batch sizes, then replayed.

A decode step launches hundreds of kernels, each so short that launching it from Python takes longer than running it. A graph
launches them all at once. It repeats exactly what was recorded, on the same memory, so a step's inputs go to fixed buffers,
and it is padded to the next recorded size. A padding row has no context and writes to no slot.
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
from minivllm.models.base import CausalLM
from minivllm.worker.model_input import ModelInput
from minivllm.worker.transfer import pack_to_device, packed_bytes

MAX_GRAPH_SIZE = 512
"""Larger batches are not captured: their kernels take long enough to hide their launches."""

MAX_LOGITS_SIZE = 64
"""Graphs of at most so many rows compute logits, too. Larger steps hide one more launch, and each size's logits take memory."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that graphs are captured for: 1, 2, 4, multiples of 8, and the largest batch there can be."""
    largest = min(max_num_seqs, MAX_GRAPH_SIZE)
    return sorted({size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest} | {largest})


class StaticInputs:
    """Memory at fixed addresses for the inputs of a decode step of up to `max_num_seqs` rows and `max_blocks` blocks each.

    A step comes in one copy, without padding (`receive`), and then a kernel spreads it over the rows (`unpack`). That kernel is
    the first one of each graph, so a replay needs one copy and one launch. Copies and replays are queued on one stream: the copy
    of the next step waits until the graph of this step has run.

    Attributes:
        packed: The step as it came from the host, bytes.
        ops: With the operation that unpacks it.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
        numbers, table = max_num_seqs * 8, max_num_seqs * max_blocks * 4
        sizes = [16, numbers, numbers, numbers, numbers // 2, table, numbers // 2 + 4]  # what `receive` packs
        self.packed = torch.zeros(packed_bytes(sizes)[-1], dtype=torch.uint8, device=device)
        self.ops = Ops(load_platform_kernels(device), Checks.NONE)
        self.input_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.slot_mapping = torch.full((max_num_seqs,), -1, dtype=torch.int64, device=device)
        self.block_tables = torch.zeros((max_num_seqs, max_blocks), dtype=torch.int32, device=device)
        self.context_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self.query_start_loc = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=device)

    def view(self, size: int) -> ModelInput:
        """The first `size` rows."""
        metadata = AttentionMetadata(
            is_decode=True,
            slot_mapping=self.slot_mapping[:size],
            block_tables=self.block_tables[:size],
            context_lens=self.context_lens[:size],
            query_start_loc=self.query_start_loc[: size + 1],
        )
        return ModelInput(self.input_ids[:size], self.positions[:size], metadata, [])

    def receive(self, arrays: list[np.ndarray]) -> list[Tensor]:
        """Copy a decode step to the device, without waiting. Returns the arrays as parts of `packed`, which may still be changed.

        Args:
            arrays: Input ids, positions and slots, `[num_seqs]` int64; context lengths, `[num_seqs]`, block tables,
                `[num_seqs, blocks]`, and where the sequences begin, `[num_seqs + 1]`, int32.
        """
        header = np.array(arrays[4].shape, np.int64)
        return pack_to_device([header, *arrays], self.packed.device, out=self.packed)[1:]

    def holds(self, inputs: ModelInput) -> bool:
        """Whether these tensors were returned by `receive`."""
        return inputs.input_ids.untyped_storage().data_ptr() == self.packed.data_ptr()

    def unpack(self, size: int) -> ModelInput:
        """Spread the step over the first rows, and make the rows up to `size` padding."""
        inputs = self.view(size)
        metadata = inputs.metadata
        rows = inputs.input_ids, inputs.positions, metadata.slot_mapping, metadata.context_lens, metadata.block_tables
        self.ops.unpack_decode_inputs(self.packed, *rows)
        return inputs


class DecodeGraphs:
    """Captures a model's decode steps over one cache, and replays them.

    Attributes:
        outputs: Of each captured size, the hidden states, `[size, hidden_size]`.
        logits: Of the sizes up to `MAX_LOGITS_SIZE`, if the model has a head of this package: `[size, vocab_size]`.
    """

    def __init__(
        self, model: CausalLM, kv_caches: list[KVCache], max_num_seqs: int, max_blocks: int, device: torch.device
    ) -> None:
        self.model = model
        self.kv_caches = kv_caches
        self.sizes = graph_sizes(max_num_seqs)
        self.inputs = StaticInputs(self.sizes[-1], max_blocks, device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[int, Tensor] = {}
        self.logits: dict[int, Tensor] = {}
        self.pool: Any = None

    @torch.inference_mode()
    def capture(self, sizes: list[int] | None = None) -> None:
        """Capture one graph for each of these sizes (None: all), from the largest down, so that smaller ones reuse its memory.

        Raises:
            ConfigError: The GPU has too little memory left.
        """
        sizes = sorted(sizes or self.sizes, reverse=True)
        try:
            for size in tqdm(sizes, desc="Capturing CUDA graphs", disable=len(sizes) == 1 or sys.stderr is None):
                self._forward(size)  # compiles the kernels, which cannot be done while capturing
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self.pool):
                    self._keep(size, *self._forward(size))
                self.pool = graph.pool()
                self.graphs[size] = graph
        except RuntimeError as error:  # torch.cuda.OutOfMemoryError, or what CUDA says while capturing
            if "out of memory" not in str(error):
                raise
            raise ConfigError(
                "The GPU has too little memory left for CUDA graphs: lower gpu_memory_utilization or max_num_seqs, or set "
                "enforce_eager=True."
            ) from None

    def can_run(self, num_seqs: int, num_blocks: int) -> bool:
        """Whether a decode step of so many sequences, with block tables so wide, has a captured size."""
        return num_seqs <= self.sizes[-1] and num_blocks <= self.inputs.block_tables.shape[1]

    def run(self, inputs: ModelInput) -> Tensor:
        """Hidden states of the decode step that `inputs` has received, `[num_seqs, hidden_size]`; overwritten by the next one."""
        num_seqs = len(inputs.input_ids)
        size = next(size for size in self.sizes if size >= num_seqs)
        self.graphs[size].replay()
        return self.outputs[size][:num_seqs]

    def get_logits(self, num_seqs: int) -> Tensor | None:
        """Logits of the step that ran last, `[num_seqs, vocab_size]`, overwritten by the next one; None if its graph has none."""
        size = next(size for size in self.sizes if size >= num_seqs)
        return self.logits[size][:num_seqs] if size in self.logits and has_own_head(self.model) else None

    def logits_bytes(self) -> int:
        """Bytes of the logits that all sizes will keep, once one size has been captured."""
        rows = sum(size for size in self.sizes if size <= MAX_LOGITS_SIZE)
        return rows * max((logits[0].nbytes for logits in self.logits.values()), default=0)

    def _keep(self, size: int, hidden: Tensor, logits: Tensor | None) -> None:
        self.outputs[size] = hidden
        if logits is not None:
            self.logits[size] = logits

    def _forward(self, size: int) -> tuple[Tensor, Tensor | None]:
        inputs = self.inputs.unpack(size)
        hidden = self.model.forward(inputs.input_ids, inputs.positions, self.kv_caches, inputs.metadata)
        assert isinstance(hidden, Tensor), "a pipeline stage captures no graphs"
        has_logits = size <= MAX_LOGITS_SIZE and has_own_head(self.model)
        return hidden, self.model.compute_logits(hidden) if has_logits else None


def has_own_head(model: CausalLM) -> bool:
    """Whether a method of this package computes the logits, all of them on this rank. One of the user's may wait for the GPU,
    which cannot be captured."""
    is_own = type(model).compute_logits.__module__.startswith("minivllm.models.") and "compute_logits" not in vars(model)
    return is_own and model.choose is None
