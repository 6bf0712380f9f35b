"""Lesson 03's checks: the solution passes, an untouched exercise fails at each, other right solutions pass, mistakes fail where they belong.

`tests/support/mutate_lesson.py 03` makes many more mistakes, small ones.
"""

from __future__ import annotations

import ast

import nbformat
import pytest
import torch
from lesson_cells import ROOT, Cell, edited, read_cells, run_cells, without_earlier_checks
from lesson_checks import LessonChecks

from minivllm.course.lessons.padded_steps import PaddedAttention, PaddedStep, make_requests, to_padded
from minivllm.errors import ConfigError
from minivllm.layers.attention import AttentionMetadata

CELLS = read_cells("03")
MASK = "a token sees its own past and nothing else"
ROWS = "every row has one text, and a length of its own"
LAYOUT = "padding has no place in a text"
RUNNER = "a step computes each new token once and asks only for the last one's logits"
GENERATE = "no token is computed twice"
TEXT = "the model writes the same text as in the engine"

_VISIBLE = "return torch.arange(num_slots) <= positions[:, :, None]"
_STARTS = "starts = [self.cache.lengths[row] for row in rows]"


class TestChecks(LessonChecks):
    number = "03"
    with_other_input = frozenset({"check-engine"})
    points = 18
    every = 7


ISOLATED = {
    "mask": (_VISIBLE, _VISIBLE.replace("<=", "<"), [MASK]),
    "layout": ("torch.arange(start, start + len(tokens))", "torch.arange(len(tokens))", [LAYOUT]),
    "rows": ("        self.free_rows.append(row)\n", "", [ROWS]),
    "runner": (_STARTS, "starts = [0 for row in rows]", [RUNNER]),
    "generate": ("        tokens = output[-1:]\n    runner.cache.release(row)\n", "        tokens = output[-1:]\n", [GENERATE]),
}


@pytest.mark.parametrize("old, new, failed", ISOLATED.values(), ids=ISOLATED)
def test_a_mistake_fails_on_its_own_stage_only(old, new, failed):
    assert run_cells(without_earlier_checks(CELLS, edited(CELLS, old, new))).failed == failed


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, words",
    [
        (_STARTS, "starts = [max(self.cache.lengths[row] - 1, 0) for row in rows]", "Your `serve` writes with the model"),
        (_VISIBLE, _VISIBLE.replace("<=", "<"), "Expected tokens"),
    ],
)
def test_the_real_model_would_notice_too(old, new, words):
    cells = [cell for cell in CELLS if cell.name not in ("look", "check-engine")]
    outcome = run_cells(edited(cells, old, new), with_model=True)
    assert TEXT in outcome.failed
    assert words in str(outcome.checks[TEXT])


def test_the_grader_looks_at_a_layer_of_the_engine():
    source = 'with check("a layer", points=1):\n    lesson_03.check_engine(Attending)'
    cells = [*(cell for cell in CELLS if cell.kind == "answer" or cell.name == "setup"), Cell("layer", source, "check")]
    one, other = (run_cells(cells, seed=seed) for seed in (1, 2))
    assert one.failed == other.failed == [] and one.seen != other.seen
    for old, new in ((_VISIBLE, _VISIBLE.replace("<=", "<")), ("new[i, :count]", "new[0, :count]")):
        wrong = run_cells(edited(cells, old, new), seed=1)
        assert wrong.failed == ["a layer"] and wrong.seen != one.seen


def classes_of_the_walkthrough():
    """The source of all classes and functions that the walkthrough writes, in order."""
    cells = nbformat.read(ROOT / "notebooks" / "03_the_kv_cache.ipynb", as_version=4).cells
    code = "\n".join(cell.source.replace("%matplotlib", "#") for cell in cells if cell.cell_type == "code")
    return [ast.unparse(node) for node in ast.parse(code).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]


@pytest.mark.slow
def test_pasting_the_walkthrough_earns_nothing():
    """Its functions under the names of the exercise."""
    imports = "import torch\nimport torch.nn.functional as F\nfrom minivllm.kernels.reference import causal_attention\nfrom minivllm.layers.attention import AttentionBackend"
    names = ("CacheSize", "Writing", "Masking", "Attending", "RowCache", "Padding", "Runner")
    pasted = "\n\n".join(
        [imports, *classes_of_the_walkthrough(), *(f"{name} = Ours" for name in names), "generate = write", "serve = write_batch"]
    )
    cells = [cell for cell in CELLS if cell.kind != "answer"]
    cells.insert(1, Cell("pasted", pasted, "answer"))
    assert run_cells(cells).points == 0


def test_an_engines_ragged_batch_is_padded_and_unpadded():
    metadata = AttentionMetadata(False, torch.empty(0), torch.tensor([[2], [0]]), torch.tensor([5, 3]), torch.tensor([0, 1, 4]))
    step, places = to_padded(metadata)
    assert step == PaddedStep([2, 0], [4, 0], [1, 3])
    assert places.tolist() == [0, 3, 4, 5]
    metadata.block_tables = torch.tensor([[2, 1], [0, 3]])
    with pytest.raises(ConfigError, match="set block_size to max_model_len"):
        to_padded(metadata)


def test_the_frame_of_attention_calls_both_parts_with_padded_tensors():
    seen = []

    class Recording(PaddedAttention):
        def write(self, kv_cache, keys, values, step):
            seen.append(("write", list(keys.shape), kv_cache))

        def attend(self, query, kv_cache, step):
            seen.append(("attend", list(query.shape), kv_cache))
            return query * 2

    attention = Recording(2, 1, 4, 1.0)
    query, key = torch.randn(6, 2, 4), torch.randn(6, 1, 4)
    assert torch.equal(attention(query, key, key, "cache", PaddedStep([1, 0], [0, 0], [3, 2])), query * 2)
    assert seen == [("write", [2, 3, 1, 4], "cache"), ("attend", [2, 3, 2, 4], "cache")]
    metadata = AttentionMetadata(False, torch.empty(0), torch.tensor([[2], [0]]), torch.tensor([5, 3]), torch.tensor([0, 1, 4]))
    assert torch.equal(attention(query[:4], key[:4], key[:4], "cache", metadata), query[:4] * 2)


@pytest.mark.slow
def test_requests_for_a_loop_choose_and_end_as_in_the_engine():
    from minivllm import LLM, SamplingParams

    llm = LLM("smollm2-135m", device="cpu", num_gpu_blocks_override=16)
    [request] = make_requests(llm, ["Water boils at"], SamplingParams(temperature=0, max_tokens=3))
    logits = torch.zeros(llm.llm_engine.model_config.vocab_size)
    logits[77] = 1.0
    assert request.choose(logits, []) == 77
    assert [request.is_finished(output) for output in ([], [5, 6], [5, 6, 7])] == [False, False, True]
    [ends] = make_requests(llm, ["Water boils at"], [SamplingParams(max_tokens=9, stop_token_ids=[5])])
    assert ends.is_finished([4, 5]) and not ends.is_finished([5, 4])
    assert ends.is_finished([request.request.eos_token_ids[0]])
