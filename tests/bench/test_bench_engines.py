"""Engines in processes of their own: the protocol, what is done when one fails, and what is told of them."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import engine_comparison
import engine_script
import psutil
import pytest
from engine_comparison import ENGINE_NAMES, Comparison, EngineResult, compare, count_equal, format_comparison, make_specs
from engine_process import SCRIPT, EngineProcess, EngineSpec, find_versions, start_all
from hypothesis import given
from hypothesis import strategies as st

from minivllm.bench.workloads import WorkloadRequest
from minivllm.errors import ConfigError
from minivllm.models.registry import load_model_config

FAKE = f"""
import importlib.util, os, signal, subprocess, sys

spec = importlib.util.spec_from_file_location("engine_script", {str(SCRIPT)!r})
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


class Fake:
    how = "counts"

    def __init__(self, settings):
        self.settings = settings
        print("an engine that talks")
        if settings.get("child"):
            self.note(f"pid {{subprocess.Popen(['sleep', '60']).pid}}")
        self.note(f"pid {{os.getpid()}}")
        self.note("load")
        if settings.get("fails") == "load":
            raise ValueError("no such\\nmodel here.")

    def note(self, event):
        with open(self.settings["notes"], "a") as notes:
            print(self.settings["name"], event, file=notes)

    def run(self, requests):
        self.note(f"run {{len(requests)}}")
        os.write(1, b"even past Python\\n")
        subprocess.run(["echo", "and from a child"])
        fails = self.settings.get("fails")
        if fails == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fails == "exits":
            os._exit(3)
        extra = fails == "counts"
        start = self.settings.get("start", 0)
        return [[start + prompt[0] + i for i in range(n + extra)] for prompt, n in requests]


script.ENGINES["fake"] = (Fake, ("json",), ("pytest",))
script.ENGINES["ghost"] = (Fake, ("no_such_module",), ())
sys.exit(script.main(sys.argv[1:]))
"""
"""An engine that does no work, on the protocol of the real script."""

REQUESTS = [WorkloadRequest([10, 11], 3), WorkloadRequest([20], 12), WorkloadRequest([30], 1)]


@pytest.fixture
def make_spec(tmp_path):
    """Makes the specs of fake engines, which write down what they do in one file."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)

    def make(name="a", kind="fake", python=sys.executable, **settings):
        settings |= {"name": name, "notes": str(tmp_path / "notes"), "max_num_seqs": 2}
        return EngineSpec(name, kind, python, settings, "do this to install it", script)

    make.notes = lambda: (tmp_path / "notes").read_text().splitlines()
    return make


def test_tokens_come_back_whatever_else_the_engine_prints(make_spec):
    with start_all([make_spec()]) as (engine,):
        engine.load()
        run = engine.run(REQUESTS)
    assert run.tokens == [[10, 11, 12], list(range(20, 32)), [30]]
    assert (run.num_tokens, engine.how) == (16, "counts")
    assert run.seconds > 0 < engine.load_seconds


def test_engines_run_in_turn_after_a_short_warm_up(make_spec):
    compare([make_spec("a"), make_spec("b")], "w", REQUESTS, rounds=2, use_tqdm=False)
    assert [note for note in make_spec.notes() if "pid" not in note] == [
        "a load", "a run 2", "b load", "b run 2", "a run 3", "b run 3", "a run 3", "b run 3",
    ]  # fmt: skip


def test_an_engine_is_stopped_while_it_is_not_its_turn(make_spec):
    with start_all([make_spec(child=True)]) as (engine,):
        engine.load()
        process = psutil.Process(engine._process.pid)
        for _ in range(2):
            for each in (process, *process.children()):
                wait_for(lambda each=each: each.status() == psutil.STATUS_STOPPED)
            engine.run(REQUESTS)


def wait_for(condition):
    """A signal takes a moment to arrive."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "fails,sentence",
    [
        ("load", r"b failed \(model here\); its log is .*b-.*\.log\.$"),
        ("dies", r"b failed \(its process has ended, SIGKILL\); its log is"),
        ("exits", r"b failed \(its process has ended, status 3\); its log is"),
        ("counts", r"^b gave request 0 2 tokens instead of 1\.$"),
    ],
)
def test_a_failure_is_told_in_a_sentence_and_ends_every_process(make_spec, fails, sentence):
    with pytest.raises(ConfigError, match=sentence) as failed:
        compare([make_spec("a", child=True), make_spec("b", child=True, fails=fails)], "w", REQUESTS, use_tqdm=False)
    started = [int(note.split()[2]) for note in make_spec.notes() if "pid" in note]
    assert len(started) == 4
    wait_for(lambda: not any(map(is_alive, started)))
    if "its log is" in str(failed.value):
        log = Path(str(failed.value).rpartition("its log is ")[2].rstrip("."))
        assert "an engine that talks" in log.read_text()
        log.unlink()


def test_closing_ends_what_the_engine_has_started(make_spec):
    engine = EngineProcess(make_spec(child=True))
    engine.load()
    (child,) = psutil.Process(engine._process.pid).children()
    log = engine._log
    engine.close()
    wait_for(lambda: not is_alive(child.pid))
    assert not log.exists()


def test_engines_do_not_outlive_a_process_that_is_terminated(make_spec):
    code = """
import os, signal, sys
from engine_process import EngineSpec, start_all
with start_all([EngineSpec(**eval(sys.argv[1]))]) as (engine,):
    engine.load()
    os.kill(os.getpid(), signal.SIGTERM)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *filter(None, sys.path)])}
    spec = vars(make_spec(child=True)) | {"script": str(make_spec().script)}
    done = subprocess.run([sys.executable, "-c", code, repr(spec)], capture_output=True, text=True, env=environment)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    started = [int(note.split()[2]) for note in make_spec.notes() if "pid" in note]
    assert len(started) == 2
    wait_for(lambda: not any(map(is_alive, started)))


def test_what_is_missing_is_told_before_anything_is_loaded(make_spec, tmp_path):
    for missing, sentence in (
        (make_spec("b", kind="ghost"), "b cannot be started: .* has no package no_such_module; do this to install it.$"),
        (make_spec("b", python=str(tmp_path / "python")), "b cannot be started: .*python is not a Python that runs.$"),
        (make_spec("b", python="/bin/false"), "b cannot be started: /bin/false fails"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            compare([make_spec("a"), missing], "w", REQUESTS, use_tqdm=False)
    assert not (tmp_path / "notes").exists()


def test_versions_are_those_of_the_engines_environment(make_spec):
    assert find_versions(make_spec()) == {"python": sys.version.split()[0], "pytest": pytest.__version__}


def test_tokens_are_held_against_the_first_engine_or_transformers(make_spec):
    wrong = make_spec("minivllm", start=1)
    comparison = compare([wrong, make_spec("transformers-static")], "w", REQUESTS, rounds=1, use_tqdm=False)
    assert comparison.token_reference == "transformers-static"
    first, second = comparison.engines
    assert (first.equal_requests, first.equal_tokens, first.first_differences) == (0, 0, {0: 0, 1: 0, 2: 0})
    assert (second.equal_requests, second.equal_tokens, second.first_differences) == (3, 16, {})
    assert compare([wrong], "w", REQUESTS, rounds=1, use_tqdm=False).token_reference == "minivllm"


def test_the_first_difference_is_counted():
    assert count_equal([1, 2, 3], [1, 2, 3]) == 3
    assert count_equal([1, 9, 3], [1, 2, 3]) == 1


def make_comparison() -> Comparison:
    def engine(name, speeds, repeatable=True):
        return EngineResult(name, "", {}, {}, 2.5, 1234.5, [1.0] * 3, speeds, 2, 15, {2: 4}, repeatable)

    engines = [
        engine("minivllm", [90.0, 150.0, 120.0]),
        engine("vllm", [60.0, 61.0, 50.0], repeatable=False),
        engine("vllm-bfloat16", [100.0] * 3),
    ]
    return Comparison("w", 3, 40, 16, ["vllm", "vllm-bfloat16"], "minivllm", engines)


def test_the_table_shows_medians_extremes_and_ratios():
    header, _, first, second, *_, note = format_comparison(make_comparison()).split("\n")
    assert header.split()[:8] == ["engine", "tokens/s", "min", "max", "x", "vllm", "x", "vllm-bfloat16"]
    assert first.split() == ["minivllm", "120.0", "90.0", "150.0", "2.00", "1.20", "2.5", "s", "1234", "MB", "2/3", "15/16"]
    assert second.split()[1:6] == ["60.0", "50.0", "61.0", "1.00", "0.60"]
    assert note == "vllm gave other tokens in another round."
    assert len(header) == len(first)


def test_speeds_are_relative_to_vllm_or_else_to_the_first_engine(make_spec):
    engines = [make_spec("minivllm"), make_spec("vllm-bfloat16")]
    assert compare(engines, "w", REQUESTS, rounds=1, use_tqdm=False).speed_references == ["vllm-bfloat16"]
    assert compare(engines[:1], "w", REQUESTS, rounds=1, use_tqdm=False).speed_references == ["minivllm"]


def test_json_has_every_round_and_the_ratios():
    report = json.loads(json.dumps(make_comparison().to_json()))
    first = report["engines"][0]
    assert first["output_tokens_per_second"] == [90.0, 150.0, 120.0]
    assert [first[name] for name in ("median", "min", "max")] == [120.0, 90.0, 150.0]
    assert first["ratios"] == {"vllm": 2.0, "vllm-bfloat16": 1.2}


def test_every_engine_gets_the_same_limits_and_the_kind_that_the_script_knows(smollm2_path, monkeypatch):
    monkeypatch.setattr("minivllm.config.EngineArgs.names", classmethod(lambda cls: ["model", "max_num_seqs", *NAMES]))
    config = load_model_config("smollm2-135m", smollm2_path)
    args = {"model": "smollm2-135m", "max_num_seqs": 4, "device": "auto"}
    specs = {spec.name: spec for spec in make_specs(ENGINE_NAMES, config, args, REQUESTS, gguf="m.gguf", vllm_python="/v/python")}
    assert list(specs) == list(ENGINE_NAMES)
    assert {spec.kind for spec in specs.values()} == set(engine_script.ENGINES)
    for spec in specs.values():
        settings = spec.settings.get("engine_args", spec.settings)
        assert (settings["max_num_seqs"], settings["max_model_len"]) == (4, 1024)
        assert settings["kv_cache_memory_bytes"] == 4 * 1024 * 2 * 30 * 3 * 64 * 4
    assert specs["minivllm-int8"].settings["engine_args"]["quantization"] == "int8"
    both = specs["minivllm-int8-bfloat16"].settings["engine_args"]
    assert (both["quantization"], both["dtype"]) == ("int8", "bfloat16")
    assert specs["minivllm-bfloat16"].settings["engine_args"]["dtype"] == "bfloat16"
    assert not {"quantization", "dtype"} & set(specs["minivllm"].settings["engine_args"])
    assert [specs[name].settings["dtype"] for name in ("vllm", "vllm-bfloat16")] == ["float32", "bfloat16"]
    assert [specs[name].settings["enforce_eager"] for name in ("vllm", "vllm-eager")] == [False, True]
    assert specs["vllm"].python == "/v/python"


NAMES = ["device", "dtype", "max_model_len", "kv_cache_memory_bytes", "quantization"]


@pytest.mark.parametrize(
    "options,sentence",
    [
        (["--engines", "minivllm", "--quantization", "int8"], "Name minivllm-bfloat16, minivllm-int8 or"),
        (["--engines", "minivllm", "--rounds", "0"], "The number of rounds is 0"),
        (["--engines", "minivllm", "minivllm"], "The engine minivllm is named more than once"),
        (["--engines", "minivllm", "--device", "cuda"], "is made on the CPU"),
        (["--engines", "minivllm", "vllm", "--vllm-python", "no-python"], "no-python is not a Python that runs"),
        (["--engines", "minivllm", "--max-model-len", "14"], "Request 0 of the workload grows beyond the 14 tokens"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_a_sentence(capsys, tmp_path, options, sentence):
    workload = write_workload(tmp_path)
    assert engine_comparison.main(["--workload", str(workload), *options]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_comparison_needs_one_workload(capsys):
    assert engine_comparison.main(["--engines", "minivllm"]) == 2
    assert "takes one workload: give --workload FILE, or one --distribution" in capsys.readouterr().err


@pytest.mark.parametrize(
    "engine,module,hint", [("vllm", "vllm", "tools/setup_vllm.py"), ("llama.cpp", "llama_cpp", "--llama-python")]
)
def test_a_peer_that_is_not_installed_is_told_with_what_to_do(capsys, tmp_path, engine, module, hint):
    if "missing" not in engine_script.find_versions(engine):
        pytest.skip(f"{module} is installed here")
    assert engine_comparison.main(["--workload", str(write_workload(tmp_path)), "--engines", engine]) == 2
    error = capsys.readouterr().err
    assert f"has no package {module}" in error
    assert hint in error


def write_workload(folder):
    file = folder / "tiny.json"
    file.write_text(json.dumps([{"ids": list(range(100, 110 + i)), "out": 5 - i} for i in range(4)]))
    return file


@pytest.mark.slow
@pytest.mark.long
def test_minivllm_and_transformers_agree_through_their_processes(capsys, tmp_path):
    report = tmp_path / "report.json"
    options = ["--workload", str(write_workload(tmp_path)), "--max-num-seqs", "3", "--rounds", "1", "--json", str(report)]
    assert engine_comparison.main(["--engines", "minivllm", "transformers-static", "transformers-continuous", *options]) == 0
    assert "x minivllm" in capsys.readouterr().out
    content = json.loads(report.read_text())
    comparison = content["comparison"]
    assert (comparison["output_tokens"], comparison["token_reference"]) == (14, "transformers-static")
    for engine in comparison["engines"]:
        assert (engine["equal_requests"], engine["equal_tokens"]) == (4, 14)
        assert engine["peak_memory_mb"] > 500
        assert engine["versions"]["torch"]
        assert "max_num_seqs" in json.dumps(engine["settings"])
        assert str(Path.home()) not in json.dumps(engine)


class FakeLlamaCpp:
    """What `engine_script.LlamaCpp` needs of llama_cpp. A sequence's next token is the sum of all before, modulo `VOCAB`."""

    VOCAB, ROOM = 97, 8
    LLAMA_FLASH_ATTN_TYPE_DISABLED = 0

    def __init__(self):
        self.slots, self.rows, self.sizes = {}, {}, []

    def __getattr__(self, name):  # what makes or frees something
        return lambda *arguments: SimpleNamespace(n_batch=self.ROOM, n_seq_max=1, n_ctx=0)

    def llama_batch_init(self, size, embedding_size, num_seqs):
        seq_ids = [[None] * num_seqs for _ in range(size)]
        return SimpleNamespace(
            n_tokens=0, token=[0] * size, pos=[0] * size, n_seq_id=[0] * size, seq_id=seq_ids, logits=[False] * size
        )

    def llama_vocab_n_tokens(self, vocab):
        return self.VOCAB

    def llama_decode(self, context, batch):
        self.rows = {}
        self.sizes.append(batch.n_tokens)
        for row in range(batch.n_tokens):
            assert batch.n_seq_id[row] == 1
            tokens = self.slots.setdefault(batch.seq_id[row][0], [])
            assert batch.pos[row] == len(tokens), "a position is left out or filled twice"
            tokens.append(batch.token[row])
            if batch.logits[row]:
                self.rows[row] = sum(tokens) % self.VOCAB
        return 0

    def llama_get_logits_ith(self, context, row):
        return (ctypes.c_float * self.VOCAB)(*(float(token == self.rows[row]) for token in range(self.VOCAB)))

    def llama_memory_seq_rm(self, memory, slot, first, last):
        assert (first, last) == (-1, -1)
        del self.slots[slot]


@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 96), min_size=1, max_size=30), st.integers(1, 6)), min_size=1, max_size=7
    ),
    num_slots=st.integers(1, 8),
)
def test_llama_cpp_gets_batches_of_all_that_run(requests, num_slots):
    api = FakeLlamaCpp()
    with mock.patch.dict(sys.modules, {"llama_cpp": api}):
        engine = engine_script.LlamaCpp({"gguf": "m.gguf", "max_num_seqs": num_slots, "max_model_len": 64, "num_threads": 2})
    expected = []
    for prompt, output_len in requests:
        tokens = list(prompt)
        for _ in range(output_len):
            tokens.append(sum(tokens) % api.VOCAB)
        expected.append(tokens[len(prompt) :])
    assert engine.run(requests) == expected
    assert api.slots == {}, "all is free again"
    assert max(api.sizes) <= api.ROOM and min(api.sizes) > 0
