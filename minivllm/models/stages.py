"""What a pipeline stage has of a model: some of the layers. Mirrors `make_layers` and `PPMissingLayer` of `vllm/model_executor/models/utils.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from minivllm.distributed.partition import Stage


class PPMissingLayer(nn.Module):
    """Stands for what another stage has: it has no weights, and nobody calls it. The layers after it keep the numbers that they have in the checkpoint."""


def here(is_here: bool, make: Callable[[], Any]) -> Any:
    """What `make` makes, if this stage has it."""
    return make() if is_here else PPMissingLayer()


def make_layers(num_layers: int, stage: Stage, make: Callable[[int], nn.Module]) -> nn.ModuleList:
    """The decoder layers, of which this stage has its own. `make` gets a layer's number in the whole model."""
    own = stage.layers(num_layers)
    return nn.ModuleList(here(i in own, partial(make, i)) for i in range(num_layers))


def own_layers(layers: Iterable[nn.Module]) -> list[Any]:
    """Those that this stage has, in order: one for each of its KV caches."""
    return [layer for layer in layers if not isinstance(layer, PPMissingLayer)]
