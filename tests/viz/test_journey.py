"""`follow`: each call between components is noted once, times add up, and nothing is left behind. And the map and the tensors that lesson 08 draws."""

from __future__ import annotations

import itertools

import pytest

from minivllm import LLM, SamplingParams
from minivllm.errors import ConfigError
from minivllm.simulation.engine import make_simulated_engine
from minivllm.viz.engine_map import PARTS, draw_engine_map
from minivllm.viz.journey import Journey, Visit, follow
from minivllm.viz.step_tensors import draw_step_tensors

FOUR = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def llm():
    return LLM("smollm2-135m", max_num_seqs=4, max_model_len=128, num_gpu_blocks_override=32, block_size=4, attention_backend="torch",
               enable_chunked_prefill=True, max_num_batched_tokens=12)  # fmt: skip


@pytest.fixture(scope="module")
def journey(llm):
    with follow(llm) as journey:
        llm.generate("The capital of France is", FOUR, use_tqdm=False)
    return journey


def test_every_room_on_the_way_is_visited(journey):
    others = {"API server", "AsyncLLMEngine", "AsyncMPClient", "EngineCoreProc"}
    assert set(journey.seconds) == {part.name for part in PARTS} - others


def test_visits_are_counted_and_nested(journey):
    assert [(visit.component, visit.method) for visit in journey.visits] == [("LLM", "generate")]
    assert len(journey.find("LLMEngine", "step")) == len(journey.find("ModelRunner", "execute_model")) == 4
    assert len(journey.find("Attention", "forward")) == 4 * 30
    step = journey.find("EngineCore", "step")[0]
    assert [visit.component for visit in step.calls] == ["Scheduler", "Executor", "Scheduler"]
    components = [
        "LLM",
        "LLMEngine",
        "InprocClient",
        "EngineCore",
        "Executor",
        "Worker",
        "ModelRunner",
        "Llama",
        "Attention",
        "Kernels",
    ]
    calls = {(visit.component, call.component) for visit in journey for call in visit.calls}
    assert set(itertools.pairwise(components)) <= calls


def test_times_add_up(journey):
    assert all(visit.own_seconds >= 0 for visit in journey)
    assert sum(journey.seconds.values()) == pytest.approx(journey.visits[0].seconds)


def test_nothing_stays_wrapped(llm, journey):
    assert "generate" not in vars(llm) and "forward" not in vars(llm.llm_engine.executor.worker.model_runner.model)
    visits = len(list(journey))
    llm.generate("Once", FOUR, use_tqdm=False)
    assert len(list(journey)) == visits


def test_an_error_is_passed_on_and_its_visit_ends(llm):
    with pytest.raises(Exception, match="sampling_params"), follow(llm) as journey:
        llm.generate("Once", 3, use_tqdm=False)
    assert [visit.method for visit in journey] == ["generate"] and journey.visits[0].seconds > 0
    assert "generate" not in vars(llm)


def test_calls_of_one_kind_are_one_line():
    kernels = [Visit("Kernels", "write", 0.001), Visit("Kernels", "read", 0.002), Visit("Kernels", "write", 0.001)]
    lines = Journey([Visit("Llama", "forward", 0.01, kernels)]).describe().split("\n")
    assert [line.split() for line in lines] == [
        ["Llama.forward", "10.00", "ms"], ["2", "×", "Kernels.write", "2.00", "ms"], ["Kernels.read", "2.00", "ms"],
    ]  # fmt: skip


def test_an_engine_without_a_worker_cannot_be_followed():
    simulated = LLM.__new__(LLM)
    simulated.llm_engine = make_simulated_engine()
    with pytest.raises(ConfigError, match="no worker in this process"), follow(simulated):
        pass
    with pytest.raises(ConfigError, match="needs an LLM, not a LLMEngine"), follow(simulated.llm_engine):
        pass


def texts_of(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_the_map_shows_times_and_whose_components_they_are():
    texts = texts_of(draw_engine_map(seconds={"Llama": 0.1234, "Sampler": 0.0012, "LLM": 0.00004}))
    assert {"123 ms", "1.2 ms", "0.04 ms"} <= set(texts)
    assert texts_of(draw_engine_map(mine=["Scheduler", "Llama"])).count("yours") == 2
    assert texts_of(draw_engine_map(mine=[])).count("yours") == 0
    with pytest.raises(ValueError, match="The map has no part Cellar"):
        draw_engine_map(mine=["Cellar"])


def test_a_step_is_drawn_with_all_its_numbers(llm):
    engine, greedy = llm.llm_engine, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    engine.add_request("Ann", "The capital of France is", greedy)
    engine.step()
    engine.add_request("Bob", "Water boils when the pressure of its vapour is as high as that of the air", greedy)
    sequences = engine.scheduler.schedule().to_request().sequences
    inputs = engine.executor.worker.model_runner.prepare_inputs(sequences, 32)
    texts = texts_of(draw_step_tensors(inputs, ["Ann", "Bob"]))
    tensors = (
        inputs.input_ids,
        inputs.positions,
        inputs.metadata.slot_mapping,
        inputs.metadata.context_lens,
        inputs.metadata.block_tables,
    )
    for tensor in tensors:
        assert {str(number) for number in tensor.flatten().tolist()} <= set(texts)
    assert sum(text == "" for text in texts) == len(inputs.sampled_rows) == 1  # arrows
    with pytest.raises(ConfigError, match="2 sequences, but there are 1 names"):
        draw_step_tensors(inputs, ["Ann"])
    for name in ("Ann", "Bob"):
        engine.abort_request(name)


def test_a_step_that_is_too_large_is_refused(llm):
    runner = llm.llm_engine.executor.worker.model_runner
    engine = llm.llm_engine
    engine.add_request("Cem", "one", SamplingParams(temperature=0, max_tokens=2))
    [sequence] = engine.scheduler.schedule().to_request().sequences
    sequence.token_ids = [1] * 41
    sequence.block_table = list(range(11))
    with pytest.raises(ConfigError, match="has 41 tokens, and a figure has room for 40"):
        draw_step_tensors(runner.prepare_inputs([sequence], 32), ["Cem"])
    engine.abort_request("Cem")
