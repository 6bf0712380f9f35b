"""Model classes of one's own: registered as in vLLM, checked at the door, used by every engine made from then on."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from minivllm import LLM, EngineArgs, LLMEngine, ModelRegistry, SamplingParams
from minivllm.engine.engine_config import EngineConfig
from minivllm.errors import ConfigError, ModelLoadError
from minivllm.models.base import CausalLM
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.registry import MODELS

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class Loud(LlamaForCausalLM):
    """Doubles the logits: sampling differs, greedy does not."""

    def compute_logits(self, hidden):
        return 2 * super().compute_logits(hidden)


class Backwards(LlamaForCausalLM):
    """Prefers what Llama likes the least."""

    def compute_logits(self, hidden):
        return -super().compute_logits(hidden)


@pytest.fixture(autouse=True)
def _as_before():
    before = dict(MODELS)
    yield
    MODELS.clear()
    MODELS.update(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny Llama."""
    folder = tmp_path_factory.mktemp("tiny")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=64, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def arguments(model, **options):
    return {"model": model, "skip_tokenizer_init": True, "num_gpu_blocks_override": 8, "max_num_seqs": 4} | options


def write(engine):
    engine.add_request("a", [5, 6, 7], GREEDY)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[-1].outputs[0].token_ids


def test_the_engine_computes_with_the_class_that_is_registered(tiny):
    package = LLM(**arguments(tiny)).generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    ModelRegistry.register_model("LlamaForCausalLM", Backwards)
    llm = LLM(**arguments(tiny))
    assert type(llm.llm_engine.executor.worker.model_runner.model) is Backwards
    assert llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids != package
    ModelRegistry.register_model("LlamaForCausalLM", Loud)
    assert LLM(**arguments(tiny)).generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == package


def test_a_class_can_be_named_and_is_imported_when_it_is_needed(tiny):
    ModelRegistry.register_model("LlamaForCausalLM", f"{__name__}:Loud")
    assert type(LLM(**arguments(tiny)).llm_engine.executor.worker.model_runner.model).__name__ == "Loud"


def test_an_architecture_of_ones_own_is_supported_once_it_is_registered(tiny, tmp_path):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((type(tmp_path)(tiny) / file).read_bytes())
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "MyOwnForCausalLM"))
    with pytest.raises(ModelLoadError, match="'MyOwnForCausalLM' model, which is not supported"):
        LLM(**arguments(str(tmp_path)))
    ModelRegistry.register_model("MyOwnForCausalLM", Loud)
    assert "MyOwnForCausalLM" in ModelRegistry.get_supported_archs()
    LLM(**arguments(str(tmp_path)))


def test_what_is_registered_later_does_not_change_a_config(tiny):
    config = EngineConfig.from_engine_args(EngineArgs(**arguments(tiny)))
    ModelRegistry.register_model("LlamaForCausalLM", Loud)
    assert config.model_config.model_cls is LlamaForCausalLM
    assert EngineConfig.from_engine_args(EngineArgs(**arguments(tiny))).model_config.model_cls is Loud


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_a_core_in_another_process_computes_with_it_too(tiny, named):
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments(tiny)))
    package = write(engine)
    ModelRegistry.register_model("LlamaForCausalLM", f"{__name__}:Backwards" if named else Backwards)
    ours = write(LLMEngine.from_engine_args(EngineArgs(**arguments(tiny))))
    engine = LLMEngine.from_engine_args(EngineArgs(**arguments(tiny)), in_process=False)
    try:
        assert write(engine) == ours != package
    finally:
        engine.shutdown()


def test_a_class_that_another_process_cannot_import_is_refused_there(tiny):
    class Local(LlamaForCausalLM):
        pass

    ModelRegistry.register_model("LlamaForCausalLM", Local)
    config = EngineConfig.from_engine_args(EngineArgs(**arguments(tiny)))
    with pytest.raises(ConfigError, match=r"the registered model class is .*Local, which another process cannot import"):
        config.to_bytes()
    with pytest.raises(ConfigError, match="in_process=True"):
        LLMEngine.from_engine_args(EngineArgs(**arguments(tiny)), in_process=False)


class NoLogits(CausalLM):
    def forward(self, input_ids, positions, kv_caches, metadata): ...


class ThreeArguments(NoLogits):
    def forward(self, input_ids, positions, metadata): ...

    def compute_logits(self, hidden): ...


class NoPlatform(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config, None)


REFUSED = {
    "no class": (Loud.compute_logits, "must be a subclass of minivllm.models.base.CausalLM, not <function"),
    "another kind of module": (nn.Linear, "must be a subclass of minivllm.models.base.CausalLM"),
    "a transformers model": (transformers.LlamaForCausalLM, "must be a subclass of minivllm.models.base.CausalLM"),
    "a method that is missing": (NoLogits, "NoLogits has no method compute_logits(hidden), which a model must have."),
    "other arguments": (ThreeArguments, "is called with input_ids, positions, kv_caches, metadata."),
    "a constructor of its own": (NoPlatform, "NoPlatform.__init__ takes (self, config), but is called with config, platform."),
    "a name without a module": ("Loud", "must be a CausalLM subclass or a string 'module:Class', not 'Loud'."),
    "a path": ("models/loud.py:Loud", "a string 'module:Class'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_a_model_is_refused_at_the_door_in_one_sentence(name):
    model_cls, said = REFUSED[name]
    before = dict(MODELS)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        ModelRegistry.register_model("LlamaForCausalLM", model_cls)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)
    assert before == MODELS


@pytest.mark.parametrize("arch", [None, 3, "", "Llama For Causal LM", LlamaForCausalLM])
def test_an_architecture_is_a_name(arch):
    with pytest.raises(ConfigError, match="must be an architecture as config.json names it"):
        ModelRegistry.register_model(arch, Loud)


@pytest.mark.parametrize(
    ("named", "error", "said"),
    [
        ("no_such_module:Loud", ModelLoadError, "cannot be imported: No module named 'no_such_module'"),
        (f"{__name__}:Quiet", ModelLoadError, "cannot be imported: module"),
        (f"{__name__}:NoLogits", ConfigError, "NoLogits has no method compute_logits(hidden)"),
    ],
)
def test_a_name_that_leads_nowhere_is_told_when_it_is_needed(tiny, named, error, said):
    ModelRegistry.register_model("LlamaForCausalLM", named)
    with pytest.raises(error, match=re.escape(said)):
        EngineConfig.from_engine_args(EngineArgs(**arguments(tiny)))


class Unfinished(LlamaForCausalLM):
    def __init__(self, config, platform):
        super().__init__(config, platform)
        raise NotImplementedError("write this")


class WithExtra(LlamaForCausalLM):
    def __init__(self, config, platform):
        super().__init__(config, platform)
        self.extra = nn.Linear(2, 2)


def test_an_error_in_a_class_of_ones_own_is_passed_on_as_it_is(tiny):
    ModelRegistry.register_model("LlamaForCausalLM", Unfinished)
    with pytest.raises(NotImplementedError, match="write this"):
        LLM(**arguments(tiny))


def test_weights_that_the_class_asks_for_and_nobody_has_are_named(tiny):
    ModelRegistry.register_model("LlamaForCausalLM", WithExtra)
    with pytest.raises(ModelLoadError, match=r"extra.weight, extra.bias missing \(2 tensors\)"):
        LLM(**arguments(tiny))


def test_a_config_made_without_the_registry_loads_what_is_registered(tiny):
    from minivllm.layers.platform import Platform
    from minivllm.models.weights import load_model

    config = EngineConfig.from_engine_args(EngineArgs(**arguments(tiny))).model_config
    ModelRegistry.register_model("LlamaForCausalLM", Loud)
    assert type(load_model(replace(config, model_cls=None), Platform(torch.device("cpu"), torch.float32))) is Loud
