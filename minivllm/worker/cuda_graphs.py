"""Decode steps as CUDA graphs: captured once for some batch sizes, then replayed.

A decode step launches hundreds of kernels, each so short that launching it from Python takes longer than running it. A graph
launches them all at once. It repeats exactly what was recorded, on the same memory, so a step copies its inputs into fixed
buffers and is padded to the next recorded size. A padding row has no context and writes to no slot.
Mirrors `vllm/v1/worker/gpu/cudagraph_utils.py`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from minivllm.errors import ConfigError
from minivllm.layers.attention import AttentionMetadata, KVCache
from minivllm.models.base import CausalLM
from minivllm.worker.model_input import ModelInput

MAX_GRAPH_SIZE = 512
"""Larger batches are not captured: their kernels take long enough to hide their launches."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that graphs are captured for: 1, 2, 4, multiples of 8, and the largest batch there can be."""
    largest = min(max_num_seqs, MAX_GRAPH_SIZE)
    return sorted({size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest} | {largest})


class StaticInputs:
    """Buffers at fixed addresses for the inputs of a decode step: rows, and the width of the block tables."""

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device) -> None:
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

    def fill(self, inputs: ModelInput, size: int) -> None:
        """Copy a decode step into the first rows, and make the rows up to `size` padding."""
        num_seqs = len(inputs.input_ids)
        metadata = inputs.metadata
        self.input_ids[:num_seqs] = inputs.input_ids
        self.positions[:num_seqs] = inputs.positions
        self.slot_mapping[:num_seqs] = metadata.slot_mapping
        self.block_tables[:num_seqs, : metadata.block_tables.shape[1]] = metadata.block_tables
        self.context_lens[:num_seqs] = metadata.context_lens
        self.input_ids[num_seqs:size] = 0
        self.positions[num_seqs:size] = 0
        self.slot_mapping[num_seqs:size] = -1
        self.context_lens[num_seqs:size] = 0


class DecodeGraphs:
    """Captures a model's decode steps over one cache, and replays them."""

    def __init__(
        self, model: CausalLM, kv_caches: list[KVCache], max_num_seqs: int, max_blocks: int, device: torch.device
    ) -> None:
        self.model = model
        self.kv_caches = kv_caches
        self.sizes = graph_sizes(max_num_seqs)
        self.inputs = StaticInputs(self.sizes[-1], max_blocks, device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.outputs: dict[int, Tensor] = {}
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
                    self.outputs[size] = self._forward(size)
                self.pool = graph.pool()
                self.graphs[size] = graph
        except RuntimeError as error:  # torch.cuda.OutOfMemoryError, or what CUDA says while capturing
            if "out of memory" not in str(error):
                raise
            raise ConfigError(
                "The GPU has too little memory left for CUDA graphs: lower gpu_memory_utilization or max_num_seqs, or set "
                "enforce_eager=True."
            ) from None

    def can_run(self, inputs: ModelInput) -> bool:
        """Whether a step is a decode of a captured size."""
        metadata = inputs.metadata
        fits = len(inputs.input_ids) <= self.sizes[-1] and metadata.block_tables.shape[1] <= self.inputs.block_tables.shape[1]
        return metadata.is_decode and fits

    def run(self, inputs: ModelInput) -> Tensor:
        """Hidden states of a decode step, `[num_seqs, hidden_size]`; overwritten by the next one."""
        num_seqs = len(inputs.input_ids)
        size = next(size for size in self.sizes if size >= num_seqs)
        self.inputs.fill(inputs, size)
        self.graphs[size].replay()
        return self.outputs[size][:num_seqs]

    def _forward(self, size: int) -> Tensor:
        inputs = self.inputs.view(size)
        hidden = self.model.forward(inputs.input_ids, inputs.positions, self.kv_caches, inputs.metadata)
        assert isinstance(hidden, Tensor), "a pipeline stage captures no graphs"
        return hidden
