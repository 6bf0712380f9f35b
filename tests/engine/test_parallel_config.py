"""How many workers and stages there are, and what cannot be: one sentence for each wrong value, before anything is loaded."""

from __future__ import annotations

import argparse

import pytest

from minivllm import ModelRegistry
from minivllm.config import EngineArgs, ParallelConfig
from minivllm.engine.engine_config import EngineConfig
from minivllm.entrypoints.cli.options import add_engine_options
from minivllm.errors import ConfigError
from minivllm.models import registry
from minivllm.models.llama import LlamaForCausalLM


class OwnForward(LlamaForCausalLM):
    """Says nothing about stages, so it is not divided."""

    def forward(self, input_ids, positions, kv_caches, metadata):
        return super().forward(input_ids, positions, kv_caches, metadata)


class Promises(OwnForward):
    """Says that it can be divided, but cannot be given tensors."""

    supports_pipeline_parallel = True


class OwnNorm(LlamaForCausalLM):
    """Changes nothing that stages depend on."""

    qk_norm = True


def config_of(folder, **options):
    return EngineConfig.from_engine_args(EngineArgs(folder, skip_tokenizer_init=True, **options))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size is 0, but must be a whole number of at least 1"),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size is 3, but .* has 2 layers, and each stage needs one: use at most 2"),
        (
            {"pipeline_parallel_size": 2, "distributed_executor_backend": "uni"},
            "'uni', one worker in the engine's process, but pipeline_parallel_size is 2: use 'mp' or 'ray'",
        ),
        ({"pp_layer_partition": "1,1"}, "'1,1', for 2 stages, but pipeline_parallel_size is 1: give one number of layers for each stage"),
        ({"pipeline_parallel_size": 2, "pp_layer_partition": "2"}, "'2', for 1 stage, but pipeline_parallel_size is 2"),
        ({"pipeline_parallel_size": 2, "pp_layer_partition": "1,2"}, "'1,2', which adds up to 3 layers, but .* has 2"),
        *(
            ({"pipeline_parallel_size": 2, "pp_layer_partition": wrong}, "must be the number of layers of each stage, such as '12,18'")
            for wrong in ("0,2", "1,x", "", "1,,1", "-1,3", "²,1")
        ),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_values_are_told(tiny_llama, options, words):
    with pytest.raises(ConfigError, match=words):
        config_of(tiny_llama, **options)


def test_a_class_must_say_that_it_can_be_divided(tiny_llama, monkeypatch):
    monkeypatch.setattr(registry, "MODELS", dict(registry.MODELS))
    ModelRegistry.register_model("LlamaForCausalLM", OwnForward)
    with pytest.raises(
        ConfigError, match="pipeline_parallel_size is 2, but OwnForward does not say .* supports_pipeline_parallel = True"
    ):
        config_of(tiny_llama, pipeline_parallel_size=2)
    config_of(tiny_llama)
    ModelRegistry.register_model("LlamaForCausalLM", Promises)
    with pytest.raises(
        ConfigError, match="Promises has supports_pipeline_parallel = True, but its forward does not take intermediate_tensors"
    ):
        config_of(tiny_llama, pipeline_parallel_size=2)
    ModelRegistry.register_model("LlamaForCausalLM", OwnNorm)
    config_of(tiny_llama, pipeline_parallel_size=2)


def test_workers_are_counted(tiny_llama):
    config = config_of(tiny_llama, pipeline_parallel_size=2, pp_layer_partition=" 1, 1", tensor_parallel_size=2).parallel_config
    assert config.world_size == 4 and config.uses_processes and config.layer_partition == (1, 1)
    assert ParallelConfig(pipeline_parallel_size=2).uses_processes and ParallelConfig().layer_partition is None
    assert not ParallelConfig().uses_processes and ParallelConfig(distributed_executor_backend="mp").uses_processes


def test_the_command_line_has_them():
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    found = parser.parse_args(["--pipeline-parallel-size", "2", "--pp-layer-partition", "12,18"])
    assert (found.pipeline_parallel_size, found.pp_layer_partition) == (2, "12,18")
