"""A sampler and a detokenizer of one's own, in the engine."""

from __future__ import annotations

import pickle

import pytest

from minivllm import LLM, EngineArgs, SamplingParams
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.engine.engine_config import EngineConfig
from minivllm.errors import ConfigError
from minivllm.worker.sampler import SampledToken, Sampler

SMALL = {"model": "smollm2-135m", "max_model_len": 64, "num_gpu_blocks_override": 8}


class Always(Sampler):
    """Chooses the same token every time."""

    def sample(self, logits, rows):
        return [SampledToken(504) for _ in rows]


class Loud(IncrementalDetokenizer):
    """Gives out capitals."""

    def update(self, token_id):
        stop = super().update(token_id)
        self.text = self.text.upper()
        return stop

    def finish(self):
        stop = super().finish()
        self.text = self.text.upper()
        return stop


def test_the_engine_writes_what_a_sampler_and_a_detokenizer_of_ones_own_say():
    llm = LLM(**SMALL, sampler_cls=Always, detokenizer_cls=Loud)
    output = llm.generate(["Hi"], SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0]
    assert output.token_ids == [504, 504, 504] and output.text == "THETHETHE"


def test_a_detokenizer_may_be_defined_anywhere_because_text_stays_in_this_process_but_a_sampler_may_not():
    class Local(IncrementalDetokenizer):
        pass

    class LocalSampler(Sampler):
        pass

    config = EngineConfig.from_engine_args(EngineArgs(**SMALL, sampler_cls=Always, detokenizer_cls=Local))
    assert config.detokenizer_cls is Local
    sent = pickle.loads(config.to_bytes())
    assert sent.worker_config.sampler_cls is Always and sent.detokenizer_cls is None
    config = EngineConfig.from_engine_args(EngineArgs(**SMALL, sampler_cls=LocalSampler))
    with pytest.raises(ConfigError, match="sampler_cls is .*LocalSampler, which another process cannot import"):
        config.to_bytes()
