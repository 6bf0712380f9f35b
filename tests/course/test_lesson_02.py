"""Lesson 02's checks, tested as code is: the solution passes, a stub fails, and a plausible mistake fails where it belongs.

`tests/support/mutate_lesson.py 02` makes many more mistakes, small ones.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from lesson_cells import ROOT, read_cells, run_cells, untouched
from lesson_checks import LessonChecks, find_answer

from minivllm.course.lessons import lesson_02
from minivllm.course.lessons.lesson_02 import reference, situations
from minivllm.course.lessons.lesson_02.engine import config_of, first_difference
from minivllm.course.lessons.lesson_02.loading import make_weights
from minivllm.course.lessons.model_shape import ModelShape
from minivllm.models.registry import MODELS

ENGINE = "the engine generates the same tokens"


class TestChecks(LessonChecks):
    number = "02"
    says = ("xpected", "ook at")


@pytest.fixture(scope="module")
def cells():
    return read_cells("02")


@pytest.fixture(autouse=True)
def _registered_as_before():
    """The last check registers a class, as a learner's kernel should keep it; other tests should not."""
    with patch.dict(MODELS):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", [cell.name for cell in read_cells("02") if cell.kind == "answer"])
def test_one_stage_left_out_fails_its_own_check_first(cells, name):
    place = next(i for i, cell in enumerate(cells) if cell.name == name)
    check = next(cell.source for cell in cells[place:] if cell.kind == "check" and not cell.needs_a_model)
    wanted = re.search(r'check\("(.+)", points', check)[1]
    outcome = run_cells([*cells[:place], replace(cells[place], source=untouched(cells[place].source)), *cells[place + 1 :]])
    assert outcome.failed[0] == wanted and outcome.broken == {}
    assert outcome.failed[1:] == ([] if name in ("attend", "read", "mine") else [ENGINE])


@pytest.mark.parametrize("mistake", ["eps outside the root", "interleaved pairs", "KV heads tiled"])
def test_a_mistake_on_an_earlier_stage_fails_no_check_of_a_later_one(cells, mistake):
    answer = find_answer("02", mistake)
    outcome = run_cells([cell for cell in answer.make(cells) if cell.name != "check-engine"])
    assert outcome.failed == [answer.about]


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_what_the_checks_compare_with_is_what_transformers_computes(family):
    """The parts in `reference.py`, put together as the exercise says, on random weights."""
    import transformers

    shape = situations.make_shape(
        random.Random(family), rotary_dim=8, qk_norm=family == "Qwen3", tie_word_embeddings=family == "Qwen3"
    )
    given = config_of(f"{family}ForCausalLM", shape)
    config = getattr(transformers, f"{family}Config")(
        **given, rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta}
    )
    assert ModelShape.from_config(config.to_dict() | {"architectures": given["architectures"]}) == shape
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    weights, expected = make_weights(shape, random.Random(1))
    theirs.load_state_dict(dict(weights), strict=not shape.tie_word_embeddings)
    model = reference.LanguageModel(shape)
    model.load_state_dict(expected, strict=not shape.tie_word_embeddings)
    input_ids, positions = torch.arange(9), torch.arange(9)
    x, residual = model.model.embed_tokens(input_ids), None
    for layer in model.model.layers:
        x, residual = layer.input_layernorm.add_and_norm(x, residual)
        x = layer.self_attn(x, positions, lambda q, k, v: reference.causal_attention(q, k, v, torch.tensor([0, 9])))
        x, residual = layer.post_attention_layernorm.add_and_norm(x, residual)
        x = layer.mlp(x)
    ours = model.lm_head(model.model.norm.add_and_norm(x, residual)[0])
    assert (ours - theirs(input_ids[None]).logits[0]).abs().max() < 1e-4


def test_partial_rotary_is_read_from_a_config():
    config = {
        "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 99, "rope_theta": 500.0, "partial_rotary_factor": 0.75,
    }  # fmt: skip
    shape = ModelShape.from_config(config, max_position=7)
    assert (shape.head_dim, shape.rotary_dim, shape.num_kv_heads, shape.max_position) == (16, 12, 2, 7)
    assert not shape.qk_norm and not shape.tie_word_embeddings and shape.rope_theta == 500.0


def test_the_first_module_that_goes_wrong_is_named():
    right = {"model.layers.0.self_attn": torch.ones(3, 4), "model.layers.0.mlp": torch.ones(3, 4)}
    assert first_difference(right, right) == "the head"
    assert first_difference(right, right | {"model.layers.0.mlp": torch.zeros(3, 4)}) == "model.layers.0.mlp"
    assert first_difference(right, {}) == "model.layers.0.self_attn"


@pytest.mark.slow
def test_real_logits_that_are_wrong_name_the_language_and_the_module(cells):
    namespace = {"__name__": "__main__"}
    for cell in find_answer("02", "KV heads tiled").make(cells):
        if cell.kind != "check":
            exec(cell.source, namespace)
    names = ("LanguageModel", "read_checkpoint", "load_weights", "causal_attention")
    with pytest.raises(AssertionError, match=r"(?s)the one in English.*Look at model.layers.0.self_attn: it is the first module"):
        lesson_02.check_logits(*(namespace[name] for name in names))


@pytest.mark.long
@pytest.mark.slow
def test_a_sample_of_small_mistakes_is_caught():
    """In a process of its own: torch's threads in this one would be waited for in each fork."""
    command = [sys.executable, "tests/support/mutate_lesson.py", "02", "--every", "13"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    count = int(re.search(r"of (\d+) mutants caught", result.stdout)[1])
    assert count >= 12 and result.returncode == 0, result.stdout
