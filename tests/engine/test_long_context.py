"""Models that claim long contexts start with the defaults, and what an error advises works."""

from __future__ import annotations

import json
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from minivllm.config import EngineArgs
from minivllm.engine.engine_config import EngineConfig
from minivllm.errors import ConfigError
from minivllm.worker import worker
from minivllm.worker.worker import Worker


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("long")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def claim(folder, num_positions):
    """Let the model claim so many positions."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": num_positions}))
    return str(folder)


def count_blocks(model, **options):
    """The blocks that a worker finds room for."""
    config = EngineConfig.from_engine_args(EngineArgs(model=model, skip_tokenizer_init=True, device="cpu", **options))
    started = Worker(config.model_config, config.cache_config, config.scheduler_config, config.worker_config)
    started.load_model()
    return started.determine_num_available_blocks()[0]


@pytest.fixture
def machine(monkeypatch):
    """A machine of so many bytes, on which each profiling run but the first takes 10 MB."""

    def measure(work):
        work()
        return 10 * 2**20

    def set_memory(num_bytes):
        monkeypatch.setattr(worker, "available_cpu_memory", lambda: num_bytes)

    monkeypatch.setattr(worker, "measure_peak_memory", measure)
    return set_memory


@pytest.mark.parametrize("num_positions,is_chunked", [(8192, False), (65_536, False), (131_072, True), (2**20, True)])
def test_prefill_is_chunked_by_default_where_a_whole_prompt_would_be_too_much_for_a_step(num_positions, is_chunked):
    config = EngineArgs().scheduler_config(num_positions)
    assert config.enable_chunked_prefill == is_chunked
    assert config.max_num_batched_tokens == (2048 if is_chunked else num_positions)
    asked = EngineArgs(enable_chunked_prefill=False).scheduler_config(num_positions)
    assert (asked.enable_chunked_prefill, asked.max_num_batched_tokens) == (False, num_positions)
    assert EngineArgs(max_num_batched_tokens=512).scheduler_config(131_072).max_num_batched_tokens == 512


@pytest.mark.slow
@pytest.mark.parametrize("num_positions", [40_960, 131_072, 2**20])
def test_a_folder_that_claims_a_long_context_starts_with_the_defaults(folder, num_positions, machine):
    machine(20 * 2**30)
    model = claim(folder, num_positions)
    assert count_blocks(model) > 1000


@pytest.mark.slow
def test_what_only_the_first_step_allocates_is_not_multiplied(folder, monkeypatch):
    """Threads, buffers and compiled code are there once, whatever the number of tokens."""
    runs, is_measured = [], [False]
    run = worker.ModelRunner.profile_run

    def note(self, num_tokens, num_seqs, kv_caches):
        runs.append((num_tokens, is_measured[0]))
        run(self, num_tokens, num_seqs, kv_caches)

    def measure(work):
        is_measured[0] = True
        work()
        is_measured[0] = False
        return 0

    monkeypatch.setattr(worker.ModelRunner, "profile_run", note)
    monkeypatch.setattr(worker, "measure_peak_memory", measure)
    count_blocks(claim(folder, 8192))
    assert runs == [(1, False), (16, True), (256, True)]


@pytest.mark.slow
def test_each_option_that_the_error_names_works_alone(folder, machine):
    machine(4 * 2**30)
    model = claim(folder, 131_072)
    with pytest.raises(ConfigError, match="raise it, lower max_model_len .* or set enable_chunked_prefill=True") as caught:
        count_blocks(model, enable_chunked_prefill=False)
    assert "max_num_batched_tokens" not in str(caught.value), "lowering it alone would be another error"
    assert count_blocks(model, enable_chunked_prefill=True) > 0
    assert count_blocks(model, enable_chunked_prefill=False, max_model_len=8192) > 0
    machine(2**28)
    with pytest.raises(ConfigError, match="raise it, or lower max_num_batched_tokens"):
        count_blocks(model)
    assert count_blocks(model, max_num_batched_tokens=256, max_num_seqs=64) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "num_positions,megabytes,sentence",
    [
        (40_960, 1000, r"lower max_model_len \(now 40,960\) to (?P<max_model_len>16384), or set enable_chunked_prefill=True\."),
        (131_072, 250, r"raise it, or lower max_num_batched_tokens \(now 2,048\) to (?P<max_num_batched_tokens>1024)\."),
        (131_072, 100, r"\(now 2,048\) and max_num_seqs \(now 256\) to (?P<max_num_batched_tokens>(?P<max_num_seqs>64))\."),
        (40_960, 250, r"set enable_chunked_prefill=True and lower max_num_batched_tokens \(now 40,960\) to (?P<max_num_batched_tokens>1024)\."),
        (2**20, 5, "raise it, free some memory, or take a smaller dtype or model"),
    ],
)  # fmt: skip
def test_the_error_names_values_with_which_the_model_starts(folder, machine, num_positions, megabytes, sentence):
    model = claim(folder, num_positions)
    machine(megabytes * 10**6)
    with pytest.raises(ConfigError) as caught:
        count_blocks(model)
    found = re.search(sentence, str(caught.value))
    assert found, caught.value
    options = {name: int(value) for name, value in found.groupdict().items()}
    if "set enable_chunked_prefill=True and" in found[0]:
        options["enable_chunked_prefill"] = True
    if options:
        assert count_blocks(model, **options) > 0
