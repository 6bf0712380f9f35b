"""Where the ranks of a model meet. It is told to processes before they load torch."""

from __future__ import annotations

import msgspec


class Meeting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For `join_groups`.

    Attributes:
        address: Host and port of the first rank, where torch.distributed listens.
        interface: This machine's network interface to the others; None for the loopback.
        is_local: Whether all ranks are on one machine: then those on CPUs share memory, and need no torch.distributed.
        has_own_gpu: Whether each rank has a GPU that no other uses; None if they take this machine's GPUs in turn.
    """

    address: str
    interface: str | None = None
    is_local: bool = True
    has_own_gpu: bool | None = None
