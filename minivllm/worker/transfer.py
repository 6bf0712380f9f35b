"""Between host and device without waiting, so that the host runs ahead while the device computes.

A GPU takes its work from a queue. A copy from or to ordinary memory makes the host wait until the queue is empty; one from or to pinned memory
joins the queue. On a CPU there is nothing to wait for. Mirrors `AsyncGPUModelRunnerOutput` and the placeholders' part of `_prepare_input_ids` in
`vllm/v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm.distributed.parallel_state import GroupCoordinator, SingleRank

_ALIGNMENT = 16


def to_device(values: Sequence[Any] | np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A list or an array as a tensor on a device."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def packed_bytes(sizes: Iterable[int]) -> list[int]:
    """Where parts of these sizes in bytes begin in a buffer, and where the last one ends: at multiples of 16 bytes."""
    return list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))


def pack_to_device(arrays: list[np.ndarray], device: torch.device, out: Tensor | None = None) -> list[Tensor]:
    """The arrays as tensors on the device, which are parts of one buffer: one copy, for which the host does not wait.

    torch does not use pinned memory anew before the copy is done.

    Args:
        arrays: What to copy.
        device: Where to.
        out: Bytes on the device that take the copy, behind all that has been launched; new memory if None.
    """
    starts = packed_bytes(array.nbytes for array in arrays)
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = buffer.numpy()
    for array, start in zip(arrays, starts, strict=False):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    parts = buffer.to(device, non_blocking=True) if out is None else out[: starts[-1]].copy_(buffer, non_blocking=True)
    return [
        parts[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for array, start in zip(arrays, starts, strict=False)
    ]


class HostCopy:
    """Tensors on their way from the device to the host, behind what has been launched so far, and before what is launched later."""

    def __init__(self, *tensors: Tensor) -> None:
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # into pinned memory
        self._arrived = None
        if tensors[0].device.type == "cuda":
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def wait(self) -> list[Tensor]:
        """The tensors, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors


class RecentTokens:
    """The tokens that the last few steps have sampled, on the device, by sequence: what placeholders stand for.

    Only steps in flight are asked for, so nothing has to be forgotten when a sequence ends. One rank of a group samples, and all need the tokens.
    """

    def __init__(self, num_steps: int, group: GroupCoordinator | None = None) -> None:
        self._steps: deque[tuple[dict[int, int], Tensor]] = deque(maxlen=num_steps)
        """Of each step, the newest first: the row of each sequence, and the tokens, `[rows]`."""
        self._group = group or SingleRank()

    def add(self, rows: dict[int, int], token_ids: Tensor) -> None:
        """Remember what a step has sampled: the row of each sequence in `token_ids`, `[rows]`. On ranks that do not sample, its numbers
        are replaced by those of rank 0."""
        self._steps.appendleft((rows, self._group.broadcast(token_ids)))

    def fill_in(self, input_ids: Tensor, placeholders: dict[int, int]) -> None:
        """Replace placeholders in a step's input by the tokens that were sampled last for their sequences.

        A placeholder whose token is unknown stays: the step that was to sample it has failed, and the results of this one will be dropped.

        Args:
            input_ids: `[num_tokens]`, changed in place.
            placeholders: The place of each sequence's placeholder in `input_ids`.
        """
        missing = dict(placeholders)
        for rows, token_ids in self._steps:
            found = [seq_id for seq_id in missing if seq_id in rows]
            if found:
                places = [rows[seq_id] for seq_id in found], [missing.pop(seq_id) for seq_id in found]
                sources, destinations = pack_to_device([np.array(numbers) for numbers in places], input_ids.device)
                input_ids.index_copy_(0, destinations, token_ids.index_select(0, sources))
