"""Hypothesis profiles, the models that tests share, and the `slow` marker of notebooks."""

from __future__ import annotations

import os
import time

# Processes of pytest-xdist share the cores: with more threads than cores, each step of an engine waits for threads that have none.
if (num_processes := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))

import pytest
import torch
import warm_processes
from hypothesis import HealthCheck, settings
from nightly import NIGHTLY

pytest.register_assert_rewrite("lesson_checks")

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before a test or transformers imports Triton

LONG = (
    "test_tensor_parallel.py",
    "test_amx.py",
    "test_grading.py",
    "test_browser.py",
    "test_soak.py",
    "test_grading_observe.py",
    "test_triton_compiles.py",
    "test_exercises.py",
    "test_lesson_01.py",
    "test_lesson_02.py",
    "test_lesson_03.py",
    "test_lesson_04.py",
    "test_lesson_05.py",
    "test_lesson_07.py",
    "test_lesson_13.py",
    "test_failover.py",
    "test_ray_replicas.py",
    "test_course_command.py",
    "test_bench_engines.py",
    "test_process_per_request.py",
    "test_widgets.py",
    "test_api_servers.py",
    "test_pipeline_parallel.py",
    "test_link_cut.py",
)
"""Files that take half a minute or more with few tests: a process that begins one of them last keeps the others waiting. Notebooks follow.

The first compiles the CPU kernels of a fresh clone, in one process; the second needs none of them.
"""

FIRST_LONG_LESSON = "05"
"""Notebooks of lessons from this one on run only with --long, or if no test is named beside them."""

WITH_PROCESSES = {"bench", "distributed", "engine", "serving"}
"""Folders of tests whose engines run in processes of their own."""

COLD = {"test_multiproc.py", "test_replicas_command.py", "test_serve_command.py"}
"""Files of them that do without `warm_processes` when run with --long."""

_common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}
settings.register_profile("short", max_examples=20, **_common)
settings.register_profile("long", max_examples=50, **_common)
settings.register_profile("default", max_examples=100, **_common)
settings.register_profile("nightly", max_examples=1000, **_common)
settings.register_profile("gpu-check", max_examples=45, **_common)  # each new shape is compiled, on a machine that is lent
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--long` runs all tests but those for the night, with more examples."""
    parser.addoption(
        "--long",
        action="store_true",
        default=NIGHTLY,
        help="run the tests that are marked long, too, and property tests with more examples",
    )
    parser.addoption(
        "--long-within",
        type=float,
        metavar="SECONDS",
        help="skip long tests that would start more than SECONDS after the run began",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Fewer examples for anyone who is waiting for the result, unless HYPOTHESIS_PROFILE says how many."""
    if "HYPOTHESIS_PROFILE" not in os.environ:
        settings.load_profile("long" if config.getoption("--long") else "short")
    if (seconds := config.getoption("--long-within")) is not None:
        config.pluginmanager.register(NoTime(seconds))  # for notebooks, too, which are in another folder


class NoTime:
    """Skips long tests that would begin too late."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip it if it is long and there is no time."""
        if time.monotonic() > self._end and item.get_closest_marker("long"):
            pytest.skip("there was no time left for more of the long tests")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests, unless with `--long`, and nightly ones by day. With several processes, long files come first and
    solutions last: if time runs out, most of what they test has been tested by then.

    Cells of notebooks are slow tests: `-m "not slow"` leaves the notebooks out. Those of solutions and of later lessons are long ones.
    """
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker("slow")
            # The tests of lessons run the code of solutions, too, and test_notebooks.py compares the source that notebooks show.
            if item.path.parent.name == "solutions" or item.path.name >= FIRST_LONG_LESSON:
                item.add_marker("long")
    wanted = {"long": config.getoption("--long"), "nightly": NIGHTLY}
    left_out = [item for item in items if any(item.get_closest_marker(name) and not runs for name, runs in wanted.items())]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if "PYTEST_XDIST_WORKER" in os.environ:
        solutions = [item for item in items if item.path.parent.name == "solutions"]
        others = [item for item in items if item.path.parent.name != "solutions"]
        order = {name: place for place, name in enumerate(LONG)}
        others.sort(key=lambda item: order.get(item.path.name, len(LONG) + (item.path.suffix != ".ipynb")))
        items[:] = others + sorted(solutions, key=lambda item: item.path.name, reverse=True)  # those of later lessons take longer


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Processes of engines begin with their imports done, but at night: see `warm_processes`."""
    folders = {item.path.parent.name for item in session.items}
    if NIGHTLY or not warm_processes.is_possible() or not folders & WITH_PROCESSES:
        return
    nursery = warm_processes.Nursery()
    session.config.add_cleanup(nursery.close)
    warm_processes.use(nursery)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """With `--long`, some files have processes that start as they do for users."""
    warm_processes.is_paused = item.config.getoption("--long") and item.path.name in COLD


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Note for tools/rerun_failed.py whether all tests ran: 1 if so and some failed."""
    if "PYTEST_XDIST_WORKER" not in os.environ and hasattr(session.config, "cache"):
        session.config.cache.set("minivllm/exit_status", int(exitstatus))


@pytest.fixture(scope="session")
def smollm2_path():
    """The folder of the default model."""
    from minivllm.models.hub import resolve_model

    return resolve_model("smollm2-135m")


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """The folder of a model of two layers with random weights, and without a tokenizer: for what does not depend on text."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=4096, eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def hf_smollm2(smollm2_path):
    """The default model in transformers, float32: the oracle."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def llm():
    """The default model in the engine."""
    from minivllm import LLM

    return LLM("smollm2-135m", kv_cache_memory_bytes=512 * 2**20, max_num_seqs=32)


@pytest.fixture(scope="session")
def tokenizer(llm):
    """The default model's tokenizer."""
    return llm.get_tokenizer()
