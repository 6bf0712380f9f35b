"""Lesson 08's checks: the solution passes, a stub fails, other right solutions pass, and a mistake fails where it belongs and is named.

And its summit: an engine of the parts of all solved exercises writes what the package's writes, whichever of them are exchanged.
`tests/support/mutate_lesson.py 08` makes many more mistakes, small ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import sys

import pytest
import torch
from lesson_cells import ROOT, read_cells
from lesson_checks import LessonChecks
from nightly import NIGHTLY

from minivllm import LLM, SamplingParams
from minivllm.course.lessons import lesson_08
from minivllm.course.lessons.lesson_08 import engine
from minivllm.course.lessons.lesson_08.inputs import count_instructions
from minivllm.course.parts import SOURCES, my_parts, package_parts
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.tokenizer import Tokenizer

CELLS = read_cells("08")


class TestChecks(LessonChecks):
    number = "08"
    points = 19
    says = ("xpected|reused|before load_model|instructions of Python|never ends",)
    every = 11


def test_instructions_are_counted_and_tracing_is_as_before():
    before = sys.gettrace()
    few, many = (count_instructions(lambda n=n: [i + 1 for i in range(n)]) for n in (10, 1000))
    assert many > few + 900
    assert sys.gettrace() is before


def test_a_failing_step_is_not_logged_while_it_is_meant_to_fail(caplog):
    with caplog.at_level(logging.ERROR):
        namespace = answers()
        lesson_08.check_fail(namespace["MyEngineCore"])
        lesson_08.check_take(namespace["MyLLMEngine"])
    assert not caplog.records
    assert not logging.getLogger("minivllm.engine.engine_core").disabled


_space: dict = {}


def answers():
    """What the solution defines."""
    if not _space:
        _space["__name__"] = "__main__"
        for cell in CELLS:
            if cell.kind == "answer" or cell.name == "setup":
                exec(compile(cell.source, f"<{cell.name}>", "exec"), _space)
    return _space


# -- the summit ------------------------------------------------------------------------------------------------------

PROMPTS = (
    "The capital of France is", "Once upon a time", "Water boils when", "1, 2, 3, 4,", "def fibonacci(n):", "My favourite colour is", "Ships float because",
    "In the beginning", "The best way to learn is", "A cat and a dog", "Dear Sir or Madam,", "Roses are red,", "The first law of", "To be or not to be,",
    "Two plus two is", "The sun rises in the", "Once there was a king who", "It was a dark and stormy night, and", "The recipe needs", "नेपालको राजधानी",
)  # fmt: skip
REQUESTS = [
    (prompt, SamplingParams(max_tokens=10, temperature=0) if number % 2 else SamplingParams(max_tokens=10, temperature=0.9, top_p=0.9, seed=number))
    for number, prompt in enumerate(PROMPTS)
]  # fmt: skip
SIZES = range(len(SOURCES) + 1) if NIGHTLY else (0, 1, len(SOURCES) - 1, len(SOURCES))
SUBSETS = [names for size in SIZES for names in itertools.combinations(SOURCES, size)]
"""Parts that come from the package; all subsets in a nightly run, otherwise those with one part of another kind at most."""
CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 7}


@pytest.fixture(scope="module")
def mine():
    parts = my_parts(ROOT / "solutions")
    assert set(parts.mine) == set(SOURCES), parts.reasons
    return parts


@pytest.fixture(scope="module")
def tiny(tmp_path_factory, smollm2_path):
    """A tiny random model with the default model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        max_position_embeddings=128, tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((smollm2_path / "tokenizer.json").read_bytes())
    return folder


@pytest.mark.slow
@pytest.mark.long
def test_subsets_of_parts_write_the_same(mine, tiny, monkeypatch):
    tokenizer = Tokenizer(tiny)
    monkeypatch.setattr(EngineConfig, "load_tokenizer", lambda self: tokenizer)
    options = {"model": str(tiny), "num_blocks": 9, "block_size": 4, "max_model_len": 32, "max_num_batched_tokens": 32}
    requests = REQUESTS[:3]
    llm = LLM(
        **{**engine.OPTIONS, **{name: value for name, value in options.items() if name != "num_blocks"}},
        num_gpu_blocks_override=9,
    )
    llm.generate([prompt for prompt, _ in requests], [params for _, params in requests], use_tqdm=False)
    assert llm.llm_engine.num_preemptions > 0
    whole = engine.write_with_package(requests, **options)
    assert engine.write_with_package(requests, **{**options, **CHUNKS}) == whole
    for names in SUBSETS:
        chunks = CHUNKS if "scheduler_cls" in names else {}  # the scheduler of lesson 07 knows no chunks
        got = engine.write(answers()["assemble"], mine.with_packages(names), requests, **{**options, **chunks})
        assert got == whole, f"with the package's {', '.join(names) or 'nothing'}"


@pytest.mark.slow
@pytest.mark.long
def test_an_engine_of_own_parts_writes_what_the_package_writes_on_the_real_model(mine):
    expected = engine.write_with_package(REQUESTS, num_blocks=12)
    assert engine.write(answers()["assemble"], mine, REQUESTS, num_blocks=12) == expected


@pytest.mark.slow
def test_an_engine_of_own_parts_computes_prompts_in_chunks(mine):
    expected = engine.write_with_package(REQUESTS[:6])
    parts = mine.with_packages(["scheduler_cls"])
    assert engine.write(answers()["assemble"], parts, REQUESTS[:6], **CHUNKS) == expected


def test_the_culprit_is_named(mine, tiny, monkeypatch):
    tokenizer = Tokenizer(tiny)
    monkeypatch.setattr(EngineConfig, "load_tokenizer", lambda self: tokenizer)
    monkeypatch.setattr(engine, "OPTIONS", {**engine.OPTIONS, "model": str(tiny)})

    class Backwards(mine.sampler_cls):
        def sample(self, logits, rows):
            return super().sample(-logits, rows)

    parts = dataclasses.replace(mine, sampler_cls=Backwards)
    with pytest.raises(AssertionError) as failure:
        engine.check_text(answers()["assemble"], parts)
    assert "With the package's Sampler in place of yours it is right: look at MySampler, lesson 01." in str(failure.value)


def test_parts_of_the_package_alone_do_too(tiny, monkeypatch):
    tokenizer = Tokenizer(tiny)
    monkeypatch.setattr(EngineConfig, "load_tokenizer", lambda self: tokenizer)
    monkeypatch.setattr(engine, "OPTIONS", {**engine.OPTIONS, "model": str(tiny)})
    assert len(engine.check_text(answers()["assemble"], package_parts())) == len(engine.REQUESTS)
