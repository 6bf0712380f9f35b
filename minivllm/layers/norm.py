"""RMSNorm, with the residual addition that precedes it. Zhang and Sennrich, 2019 (arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minivllm.kernels.ops import Ops


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last dimension, then scales. Computed in float32.

    Args:
        size: Length of the last dimension.
        eps: Added to the mean square.
        ops: The operations of the platform.
    """

    def __init__(self, size: int, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps
        self.ops = ops

    def forward(self, x: Tensor) -> Tensor:
        """Same shape and dtype as `x`."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """The residual stream after adding `x`, normalized and as it is: `(norm(x + residual), x + residual)`.

        `None` begins the stream: there is nothing to add to yet.
        """
        if residual is None:
            return self(x), x
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)
