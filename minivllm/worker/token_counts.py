"""How often each token has occurred, kept on a GPU from step to step: for penalties, without going through all tokens again in every step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minivllm.kernels.ops import Ops
from minivllm.kernels.reference_sampling import IN_PROMPT
from minivllm.scheduler_output import SequenceData
from minivllm.worker.transfer import pack_to_device, to_device

LEAST_ROWS = 8
"""Of counts, once there are any."""
Key = tuple[int, str]
"""A sequence: its id, and that of its request."""


class TokenCounts:
    """A row of counts for each sequence with penalties: `IN_PROMPT` for tokens of the prompt, and one for each time in the output.

    A step adds only the tokens that are new. A sequence that has not been seen lately, because it was preempted for example, may lose its row to
    another, and is counted anew.

    Args:
        vocab_size, device: Of the logits.
        ops: With the operation that applies penalties.
    """

    def __init__(self, vocab_size: int, device: torch.device, ops: Ops) -> None:
        self._ops, self._device = ops, device
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._slots: dict[Key, int] = {}
        self._counted: dict[Key, int] = {}
        """How many output tokens of each sequence have been counted."""

    def is_for(self, logits: Tensor) -> bool:
        """Whether they can be applied to these logits, of the same vocabulary and on the same device."""
        return logits.shape[1] == self._counts.shape[1] and logits.device == self._device

    def penalize(self, logits: Tensor, rows: list[int], seqs: Sequence[SequenceData]) -> None:
        """Apply the penalties of some rows in place, without waiting for the device.

        Args:
            logits: `[num_rows, vocab_size]`, float32.
            rows: Those to change, each once.
            seqs: The sequence of each of them; one may have several rows.
        """
        slots = self._update({(seq.seq_id, seq.request.request_id): seq for seq in seqs})
        params = [seq.request.sampling_params for seq in seqs]
        columns = [
            [p.repetition_penalty for p in params],
            [p.presence_penalty for p in params],
            [p.frequency_penalty for p in params],
        ]
        of_seqs = [slots[seq.seq_id, seq.request.request_id] for seq in seqs]
        arrays = [np.array(rows), np.array(of_seqs), *(np.array(column, np.float32) for column in columns)]
        on_device, slots_on_device, *penalties = pack_to_device(arrays, self._device)
        self._ops.penalize(logits, on_device, self._counts, slots_on_device, *penalties)

    def _update(self, seqs: dict[Key, SequenceData]) -> dict[Key, int]:
        """Count what is new in these sequences. Returns where their counts are."""
        self._make_room(seqs)
        new_places: list[int] = []
        vocab_size = self._counts.shape[1]
        for key, seq in seqs.items():
            output, slot = seq.output_token_ids, self._slots[key]
            if not 0 <= self._counted.get(key, -1) <= len(output):
                prompt = to_device(seq.request.prompt_token_ids, self._device, torch.int64)
                self._counts[slot].zero_().index_fill_(0, prompt, IN_PROMPT)
                self._counted[key] = 0
            new_places += [slot * vocab_size + token_id for token_id in output[self._counted[key] :]]
            self._counted[key] = len(output)
        if new_places:
            places = to_device(new_places, self._device, torch.int64)
            self._counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
        return self._slots

    def _make_room(self, seqs: dict[Key, SequenceData]) -> None:
        """Give each of these sequences a row: a new one, or, when others have as many, that of the one that has not been used for longest."""
        new = [key for key in seqs if key not in self._slots]
        limit = max(LEAST_ROWS, 2 * len(seqs))  # batches may take turns
        if min(limit, len(self._slots) + len(new)) > len(self._counts):  # first, as there may be too little memory
            more = self._counts.new_zeros((limit - len(self._counts), self._counts.shape[1]))
            self._counts = torch.cat([self._counts, more])
        for key in seqs:
            if key in self._slots:
                self._slots[key] = self._slots.pop(key)  # used last
        for key in new:
            if len(self._slots) < limit:
                self._slots[key] = len(self._slots)
            else:
                oldest = next(iter(self._slots))
                self._slots[key] = self._slots.pop(oldest)
                self._counted.pop(oldest, None)  # it is not there if its first step has failed
