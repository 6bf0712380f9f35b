"""Lesson 08's checks: the solution passes, a stub fails, other right solutions pass, and a mistake fails where it belongs and is named.

And its summit: an engine of the parts of all solved exercises writes what the package's writes, whichever of them are exchanged.
`tests/support/mutate_lesson.py 08` makes many more mistakes, small ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import sys

import pytest
import torch
from lesson_cells import ROOT, Cell, edited, read_cells, run_cells, untouched, without_earlier_checks
from mutate_lesson import WANTED, find_survivors

from minivllm import LLM, SamplingParams
from minivllm.course.lessons import lesson_08
from minivllm.course.lessons.lesson_08 import engine
from minivllm.course.lessons.lesson_08.inputs import count_instructions
from minivllm.course.parts import SOURCES, my_parts, package_parts
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.tokenizer import Tokenizer

CELLS = read_cells("08")
COUNT, START = "the cache gets what the largest step leaves", "load, measure, and give the cache the rest"
LAY_OUT, SLOTS = "every row knows its sequence and its place there", "each token has a slot in its own sequence's blocks"
INPUTS, RUNNER = "prompts, chunks and decodes lie in the same tensors", "one token for each sequence that needs one"
WORKER = "blocks are where they belong before the model runs"
CORE, FAIL = "every new token is told, and who has ended is gone", "a failed step ends its own requests and no others"
ENTRANCE, ENGINE = "who is turned away leaves no trace", "tokens become text, and the end is noticed on both sides"
GENERATE, PARTS = "answers come in the order of the prompts, and nothing is left behind", "every part is in its place"

PROFILE = "        device.profile_run(limits.max_num_batched_tokens, limits.max_num_seqs)\n"
LOAD = "        device.load_model()\n"
RESET = "        device.reset_peak()\n"
TAKE_TEXT = '            if new.finish_reason != "stop":\n                stop = state.detokenizer.update(new.token_id)'
MOVES = [f"        self.cache.{how}(request.blocks_to_{how})\n" for how in ("swap_out", "swap_in", "copy")]

WRONG = {
    "the share is taken of what is left": (COUNT, "total_bytes * utilization - other_bytes - peak_bytes", "(total_bytes - other_bytes - peak_bytes) * utilization"),
    "what others hold is forgotten": (COUNT, "total_bytes * utilization - other_bytes - peak_bytes", "total_bytes * utilization - peak_bytes"),
    "the weights and the step are forgotten": (COUNT, "total_bytes * utilization - other_bytes - peak_bytes", "total_bytes * utilization - other_bytes"),
    "all of the memory is used": (COUNT, "total_bytes * utilization - other_bytes", "total_bytes - other_bytes"),
    "rounded up": (COUNT, ") // block_bytes\n", ") // block_bytes + 1\n"),
    "half a block": (COUNT, ") // block_bytes\n", ") / block_bytes\n"),
    "no block is nobody's problem": (COUNT, "if num_blocks < 1:", "if num_blocks < 0:"),
    "one block is not enough": (COUNT, "if num_blocks < 1:", "if num_blocks <= 1:"),
    "measured before the model is loaded": (START, LOAD + RESET + PROFILE, PROFILE + LOAD + RESET),
    "counted without a step": (START, PROFILE, ""),
    "loading's peak counts": (START, RESET, ""),
    "a step of one sequence": (START, "limits.max_num_batched_tokens, limits.max_num_seqs)\n        num_gpu", "limits.max_num_batched_tokens, 1)\n        num_gpu"),
    "a step of decodes only": (START, "profile_run(limits.max_num_batched_tokens, limits", "profile_run(limits.max_num_seqs, limits"),
    "two steps, neither of them the largest": (
        START, PROFILE, "        device.profile_run(limits.max_num_batched_tokens, 1)\n        device.profile_run(1, limits.max_num_seqs)\n",
    ),
    "swap space counted in bytes": (START, "config.swap_space_bytes // device.block_bytes", "config.swap_space_bytes"),
    "swap space is the device's": (START, "config.swap_space_bytes // device.block_bytes", "num_gpu_blocks"),
    "the cache is not kept": (START, "self.cache = device.allocate", "cache = device.allocate"),
    "positions start again in each chunk": (LAY_OUT, " + starts[owners]", ""),
    "positions go on through the batch": (LAY_OUT, "np.arange(len(owners)) - query_start_loc[owners] + starts", "np.arange(len(owners)) + starts"),
    "query_start_loc without the 0": (LAY_OUT, "np.concatenate(([0], np.cumsum(counts)))", "np.cumsum(counts)"),
    "query_start_loc without the end": (LAY_OUT, "np.concatenate(([0], np.cumsum(counts)))", "np.concatenate(([0], np.cumsum(counts)))[:-1]"),
    "one row for each sequence": (LAY_OUT, "np.repeat(np.arange(len(counts)), counts)", "np.arange(len(counts))"),
    "a loop over the tokens": (LAY_OUT, "owners = np.repeat(np.arange(len(counts)), counts)", "owners = np.array([i for i, count in enumerate(counts) for _ in range(count)])"),
    "the block of the position, not of the sequence": (SLOTS, "block_tables[owners, positions // block_size]", "block_tables[0, positions // block_size]"),
    "the wrong block": (SLOTS, "block_tables[owners, positions // block_size]", "block_tables[owners, (positions + 1) // block_size - (positions + 1) % block_size // block_size]"),
    "the block's number for its slot": (SLOTS, "positions // block_size] * block_size +", "positions // block_size] +"),
    "the slot in the batch": (SLOTS, "+ positions % block_size", "+ np.arange(len(positions)) % block_size"),
    "slots one by one": (
        SLOTS, "return block_tables[owners, positions // block_size] * block_size + positions % block_size",
        "return np.array([block_tables[o, p // block_size] * block_size + p % block_size for o, p in zip(owners, positions)])",
    ),
    "a context one too short": (INPUTS, "self.tensor(starts + counts, torch.int32)", "self.tensor(starts + counts - 1, torch.int32)"),
    "the context before the step": (INPUTS, "self.tensor(starts + counts, torch.int32)", "self.tensor(starts, torch.int32)"),
    "the last row of the batch": (INPUTS, "[int(row) for row, seq in zip(last_rows, sequences) if seq.num_samples]", "[len(owners) - 1]"),
    "a token is sampled in the middle of a prompt": (INPUTS, "zip(last_rows, sequences) if seq.num_samples]", "zip(last_rows, sequences)]"),
    "the first row of each sequence": (INPUTS, "query_start_loc[1:] - 1", "query_start_loc[:-1]"),
    "tables end in -1": (INPUTS, "seq.block_table + [0] *", "seq.block_table + [-1] *"),
    "64 bits for a table": (INPUTS, "self.tensor(block_tables, torch.int32)", "self.tensor(block_tables, torch.int64)"),
    "a prompt of one step is a decode": (INPUTS, "is_decode=len(owners) == len(sequences)", "is_decode=all(seq.num_computed_tokens for seq in sequences)"),
    "logits for every row": (RUNNER, "compute_logits(hidden[inputs.sampled_rows])", "compute_logits(hidden)[inputs.sampled_rows]"),
    "outputs only for those with a token": (RUNNER, "if seq.num_samples else []) for seq in sequences]", "if seq.num_samples else []) for seq in sampled]"),
    "a sampler for nobody": (RUNNER, "        if sampled:\n", "        if True:\n"),
    "tokens in the wrong order": (RUNNER, "tokens = iter(self.sampler.sample(logits, [SamplingRow(seq, seq.index) for seq in sampled]))", "tokens = reversed(self.sampler.sample(logits, [SamplingRow(seq, seq.index) for seq in sampled]))"),
    "blocks come in before others go out": (WORKER, MOVES[0] + MOVES[1], MOVES[1] + MOVES[0]),
    "nothing is copied": (WORKER, MOVES[2], ""),
    "blocks move only with tokens": (
        WORKER, MOVES[0] + MOVES[1] + MOVES[2] + "        if not request.sequences:\n            return []\n",
        "        if not request.sequences:\n            return []\n" + "".join(MOVES),
    ),
    "the runner runs for nobody": (WORKER, "        if not request.sequences:\n            return []\n        return self.runner", "        return self.runner"),
    "the scheduler never learns of it": (
        CORE, "        advanced = self.scheduler.update(output, results)\n",
        "        advanced = [(part.seq, i) for i, part in enumerate(output.scheduled)]\n        for part, result in zip(output.scheduled, results):\n            part.seq.token_ids += result.token_ids\n",
    ),
    "nobody hears of the end": (CORE, "seq.token_ids[-1], seq.finish_reason)", "seq.token_ids[-1])"),
    "the first token again and again": (CORE, "seq.token_ids[-1], seq.finish_reason", "seq.token_ids[seq.num_prompt_tokens], seq.finish_reason"),
    "chunks have tokens too": (CORE, "for seq, _ in advanced]", "for seq in [part.seq for part in output.scheduled]]"),
    "a failed step ends everybody": (
        FAIL, "sequences = [part.seq for part in output.scheduled] + output.preempted + output.swapped_in",
        "sequences = [request.sequences[0] for request in self.scheduler.requests.values()]",
    ),
    "those whose blocks were to move go on": (FAIL, " + output.preempted + output.swapped_in", ""),
    "a failed request stays in the scheduler": (FAIL, "            self.scheduler.abort_request(request_id, SequenceStatus.FINISHED_ERROR)\n", ""),
    "why it failed is not told": (FAIL, "error=f\"The model failed in a step: {error!r}\"", "error=\"The model failed.\""),
    "Ctrl-C is an error like any other": (FAIL, "except Exception as error:", "except BaseException as error:"),
    "a failed request is told twice": (FAIL, "for request_id in dict.fromkeys(seq.request.request_id for seq in sequences):", "for request_id in [seq.request.request_id for seq in sequences + sequences[:1]]:"),
    "two requests with one id": (
        ENTRANCE, "        if request_id in self.states:\n            raise RequestError(f\"There is already a request {request_id!r}.\")\n", "",
    ),
    "kept before it is checked": (
        ENTRANCE, "        processed = self.input_processor", "        self.states[request_id] = None\n        processed = self.input_processor",
    ),
    "the core goes on with an aborted request": (ENTRANCE, "            del self.states[request_id]\n            self.core.abort_request(request_id)", "            del self.states[request_id]"),
    "an unknown id is an error": (ENTRANCE, "        if request_id in self.states:\n            del", "        if True:\n            del"),
    "the token that ends it becomes text": (ENGINE, TAKE_TEXT, "            stop = state.detokenizer.update(new.token_id)"),
    "text that was held back is lost": (
        ENGINE, "        if stop is None and new.finish_reason is not None:\n            stop = state.detokenizer.finish()\n", "",
    ),
    "a stop string is overlooked": (ENGINE, "state.finish_reason = new.finish_reason if stop is None else \"stop\"", "state.finish_reason = new.finish_reason"),
    "the core goes on after a stop string": (
        ENGINE, "            if state.finish_reason is not None:\n                self.abort_request(new.request_id)\n",
        "            if state.finish_reason is not None:\n                del self.states[new.request_id]\n",
    ),
    "who has finished is never forgotten": (
        ENGINE, "            if state.finish_reason is not None:\n                self.abort_request(new.request_id)\n", "",
    ),
    "the error is not passed on": (ENGINE, "        state.error = new.error\n", ""),
    "only finished requests are told": (ENGINE, "            outputs.append(state.make_output())\n", "            if state.finish_reason is not None:\n                outputs.append(state.make_output())\n"),
    "in the order of finishing": (
        GENERATE, "return [outputs[request_id] for request_id in request_ids]",
        "return list(outputs.values())",
    ),
    "one bad prompt stops all": (GENERATE, "                except RequestError as error:\n                    outputs[request_id] = refused(request_id, error)", "                except RequestError:\n                    raise"),
    "a bad prompt is left out": (GENERATE, "return [outputs[request_id] for request_id in request_ids]", "return [outputs[i] for i in request_ids if not outputs[i].error]"),
    "ids are used again": (GENERATE, "f\"request-{next(self.numbers)}\" for _ in prompts", "f\"request-{i}\" for i, _ in enumerate(prompts)"),
    "Ctrl-C leaves requests behind": (GENERATE, "            for request_id in request_ids:\n                self.engine.abort_request(request_id)\n            raise", "            raise"),
    "Ctrl-C is swallowed": (GENERATE, "                self.engine.abort_request(request_id)\n            raise", "                self.engine.abort_request(request_id)"),
    "all have the first one's parameters": (GENERATE, "self.engine.add_request(request_id, prompt, param)", "self.engine.add_request(request_id, prompt, params[0])"),
    "somebody else's answers": (GENERATE, "return [outputs[request_id] for request_id in request_ids]", "return [outputs[request_id] for request_id in outputs]"),
    "one prompt after the other": (
        GENERATE, "                    outputs[request_id] = refused(request_id, error)\n            while self",
        "                    outputs[request_id] = refused(request_id, error)\n                while self.engine.has_unfinished_requests():\n                    for output in self.engine.step():\n                        outputs[output.request_id] = output\n            while self",
    ),
    "the core is told before it is asked": (
        ENTRANCE, "        if request_id in self.states:\n            raise RequestError(f\"There is already a request {request_id!r}.\")\n        processed = self.input_processor.process_inputs(request_id, prompt, params)\n        self.core.add_request(processed.core_request)\n",
        "        processed = self.input_processor.process_inputs(request_id, prompt, params)\n        self.core.add_request(processed.core_request)\n        if request_id in self.states:\n            raise RequestError(\"There is one.\")\n",
    ),
    "tables filled up in place": (INPUTS, "block_tables = np.array([seq.block_table + [0] * (longest - len(seq.block_table)) for seq in sequences])", "[seq.block_table.extend([0] * (longest - len(seq.block_table))) for seq in sequences]\n        block_tables = np.array([seq.block_table for seq in sequences])"),
    "only some errors are survived": (FAIL, "except Exception as error:", "except RuntimeError as error:"),
    "swapped in before preempted": (FAIL, "output.preempted + output.swapped_in", "output.swapped_in + output.preempted"),
    "errors while adding are refusals": (GENERATE, "                except RequestError as error:", "                except Exception as error:"),
    "numbers for ids": (GENERATE, "f\"request-{next(self.numbers)}\" for _ in prompts", "next(self.numbers) for _ in prompts"),
    "Ctrl-C while requests are added": (
        GENERATE, "        except BaseException:\n            for request_id in request_ids:\n                self.engine.abort_request(request_id)\n            raise",
        "        except BaseException:\n            for request_id in request_ids if outputs else []:\n                self.engine.abort_request(request_id)\n            raise",
    ),
    "the length wins over the stop string": (ENGINE, "if stop is None and new.finish_reason is not None:", "if new.finish_reason is not None:"),
    "what is held back is not searched": (ENGINE, "            stop = state.detokenizer.finish()", "            state.detokenizer.finish()"),
    "ended as if aborted": (FAIL, "(request_id, SequenceStatus.FINISHED_ERROR)", "(request_id)"),
    "the swapped in go on": (FAIL, " + output.preempted + output.swapped_in", " + output.preempted"),
    "an exception for a sentence": (FAIL, "error=f\"The model failed in a step: {error!r}\"", "error=error"),
    "a ConfigError without a word": (COUNT, "ConfigError(\"Not one block fits beside the weights and the largest step.\")", "ConfigError()"),
    "tokens and sequences exchanged": (START, "profile_run(limits.max_num_batched_tokens, limits.max_num_seqs)", "profile_run(limits.max_num_seqs, limits.max_num_batched_tokens)"),
    "the core that cannot fail": (PARTS, "core = MyEngineCore(", "core = Stepping("),
    "nothing can be swapped": (PARTS, "num_gpu_blocks, num_cpu_blocks)\n    core", "num_gpu_blocks)\n    core"),
    "tokens of the cache counted in blocks": (PARTS, "cache_tokens = num_gpu_blocks * cache_config.block_size", "cache_tokens = num_gpu_blocks"),
}  # fmt: skip
"""The mistake, the check that fails first, and what was changed."""

RIGHT = {
    "positions by ranges": (
        "positions = np.arange(len(owners)) - query_start_loc[owners] + starts[owners]",
        "positions = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts)])",
    ),
    "query_start_loc by a zero in front": ("np.concatenate(([0], np.cumsum(counts)))", "np.r_[0, np.cumsum(counts)]"),
    "rows by a search": ("np.repeat(np.arange(len(counts)), counts)", "np.searchsorted(query_start_loc[1:], np.arange(query_start_loc[-1]), side='right')"),
    "slots by flat tables": (
        "block_tables[owners, positions // block_size] * block_size + positions % block_size",
        "block_tables.reshape(-1)[owners * block_tables.shape[1] + positions // block_size] * block_size + positions % block_size",
    ),
    "a list of three": ("return query_start_loc, owners, positions", "return [query_start_loc, owners, positions]"),
    "a list of two": ("return num_gpu_blocks, num_cpu_blocks\n        ###", "return [num_gpu_blocks, num_cpu_blocks]\n        ###"),
    "a peak forgotten once more": ("        device.load_model()\n", "        device.reset_peak()\n        device.load_model()\n"),
    "forward by name": ("self.device.model(inputs", "self.device.model.forward(inputs"),
    "a NumPy number": ("    return num_blocks\n", "    return np.int64(num_blocks)\n"),
    "rows by index_select": ("hidden[inputs.sampled_rows]", "hidden.index_select(0, torch.tensor(inputs.sampled_rows))"),
    "moves in a loop": ("".join(MOVES), "        for how in ('swap_out', 'swap_in', 'copy'):\n            getattr(self.cache, how)(getattr(request, f'blocks_to_{how}'))\n"),
    "a set of those that have failed": (
        "for request_id in dict.fromkeys(seq.request.request_id for seq in sequences):",
        "for request_id in sorted({seq.request.request_id for seq in sequences}, key=[seq.request.request_id for seq in sequences].index):",
    ),
    "abort without asking": (
        "        if request_id in self.states:\n            del self.states[request_id]\n            self.core.abort_request(request_id)",
        "        self.states.pop(request_id, None)\n        self.core.abort_request(request_id)",
    ),
    "outputs in a list by place": ("                    outputs[output.request_id] = output", "                    if output.finished:\n                        outputs[output.request_id] = output"),
    "the core is asked by a bigger share": ("int(total_bytes * utilization - other_bytes - peak_bytes) // block_bytes", "(int(total_bytes * utilization) - other_bytes - peak_bytes) // block_bytes"),
}  # fmt: skip


def test_an_untouched_exercise_fails_at_its_checks_and_nowhere_else():
    outcome = run_cells([Cell(cell.name, untouched(cell.source), cell.kind) for cell in CELLS])
    assert outcome.failed == list(outcome.checks) and outcome.broken == {} and outcome.points == 0
    assert {type(error) for error in outcome.checks.values()} == {NotImplementedError}


def test_there_are_20_points():
    outcome = run_cells(CELLS)
    assert outcome.failed == [] and outcome.broken == {}
    assert outcome.points == outcome.most_points == 19  # the last one needs the model: nbval runs it


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_solution_fails_where_it_is_wrong_and_hears_why(name):
    first, old, new = WRONG[name]
    outcome = run_cells(without_earlier_checks(CELLS, edited(CELLS, old, new)), stop_at_failure=True)
    assert outcome.failed == [first]
    assert outcome.broken == {}
    error = outcome.checks[first]
    if isinstance(error, AssertionError):
        assert any(
            words in str(error)
            for words in (
                "xpected",
                "Two requests got",
                "used again",
                "before load_model",
                "instructions of Python",
                "never ends",
            )
        )


@pytest.mark.parametrize("name", RIGHT)
def test_another_right_answer_passes(name):
    old, new = RIGHT[name]
    outcome = run_cells(without_earlier_checks(CELLS, edited(CELLS, old, new)))
    assert outcome.failed == [] and outcome.broken == {}


@pytest.mark.slow
def test_a_sample_of_small_mistakes_is_caught():
    count, survivors = find_survivors("08", every=11)
    assert count >= 12
    assert len(survivors) <= (1 - WANTED) * count, [mutant.change for mutant in survivors]


def test_all_checks_are_exported_and_used():
    used = "\n".join(cell.source for cell in CELLS)
    assert all(f"lesson_08.{name}(" in used for name in lesson_08.__all__)


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
SIZES = range(len(SOURCES) + 1) if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else (0, 1, len(SOURCES) - 1, len(SOURCES))
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
        vocab_size=49152, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=128, tie_word_embeddings=True, eos_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((smollm2_path / "tokenizer.json").read_bytes())
    return folder


@pytest.mark.slow
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
