"""The boundaries of the design: who may import whom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import minivllm
from minivllm import SamplingParams

ROOT = Path(minivllm.__file__).parent
VOCABULARY = {"config", "config_checks", "parallel_config", "sampling_params", "request", "outputs", "errors", "scheduler_output"}
BELOW = {
    "core": set(),
    "kernels": set(),
    "distributed": {"kernels"},
    "layers": {"kernels", "distributed"},
    "models": {"layers", "distributed", "kernels"},
    "worker": {"models", "layers", "kernels", "distributed"},
    "executor": {"worker", "distributed"},
    "engine": {"core", "executor", "models", "data_parallel"},
    "data_parallel": {"core", "engine", "executor", "distributed"},
    "bench": {"engine", "core"},
    "simulation": {"bench", "data_parallel", "engine", "core", "executor"},
    "viz": {
        "distributed.partition",
        "kernels.accesses",
        "kernels.launches",
        "engine.trace",
        "bench.summary",
        "bench.trace_summary",
    },
    "course": {
        "viz",
        "bench",
        "simulation",
        "data_parallel.routing",
        "distributed",
        "engine",
        "core",
        "executor",
        "worker",
        "models",
        "layers",
        "kernels",
    },
    "entrypoints": {
        "data_parallel",
        "distributed",
        "engine",
        "core",
        "executor",
        "models",
        "layers",
        "worker",
        "bench",
        "simulation",
        "viz",
        "course",
    },
}
"""Folder to the folders (or modules) that it may import, besides itself and the vocabulary."""
FILES = [path for folder in BELOW for path in sorted((ROOT / folder).rglob("*.py"))]


FRONTENDS = {
    "llm_engine",
    "async_llm_engine",
    "input_processor",
    "output_processor",
    "output_handler",
    "metrics",
}
"""Modules of engine/ that deal in text and streams: above data_parallel/, which is above the rest of engine/."""


def imported_modules(path: Path) -> set[str]:
    """The minivllm modules that a file imports when it runs, without the leading package name."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    names = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return {name.removeprefix("minivllm.") for name in names if name.startswith("minivllm.")}


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(ROOT)) for path in FILES])
def test_arrows_point_down(path):
    folder = path.relative_to(ROOT).parts[0]
    allowed = {folder, *BELOW[folder]}
    for module in imported_modules(path):
        top = module.split(".")[0]
        assert top in VOCABULARY or top in allowed or module in allowed, f"{path.name} imports minivllm.{module}"


def find_imports() -> dict[str, set[str]]:
    """The modules of the package that each one imports: also inside functions, and for type checkers. The package itself only re-exports."""
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in ROOT.rglob("*.py")
    }
    del modules["__init__"]
    imports = {}
    for name, path in modules.items():
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                package = node.module.removeprefix("minivllm.")
                names = {f"{package}.{alias.name}" for alias in node.names}
                found |= names & modules.keys() or {package}
            elif isinstance(node, ast.Import):
                found |= {alias.name.removeprefix("minivllm.") for alias in node.names}
        imports[name] = found & modules.keys() - {name}
    return imports


def find_cycles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The largest sets of modules that all import each other, directly or through others."""
    reached = {name: {name} for name in imports}
    for _ in imports:
        before = sum(map(len, reached.values()))
        for name, found in imports.items():
            reached[name].update(*(reached[other] for other in found))
        if sum(map(len, reached.values())) == before:
            break
    cycles = [{other for other in found if name in reached[other]} for name, found in reached.items()]
    return [cycle for i, cycle in enumerate(cycles) if len(cycle) > 1 and cycle not in cycles[:i]]


def test_no_modules_import_each_other():
    assert find_cycles(find_imports()) == []


def test_a_cycle_is_found():
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert find_cycles(imports) == [{"b", "c"}]


def test_frontends_are_above_data_parallel_and_the_engines_core_is_below():
    for name, imports in find_imports().items():
        folder, _, module = name.partition(".")
        if folder == "data_parallel" or (folder == "engine" and module not in FRONTENDS):
            assert not imports & {f"engine.{frontend}" for frontend in FRONTENDS}, name
        if folder == "engine" and module not in FRONTENDS:
            assert not any(item.startswith("data_parallel") for item in imports), name


def test_every_folder_has_its_place():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and (path / "__init__.py").exists()}
    assert folders == set(BELOW)


def test_what_decides_needs_neither_torch_nor_numpy():
    code = (
        "import sys, minivllm.core.static_batching, minivllm.engine.llm_engine, minivllm.bench.summary; "
        "print({'torch', 'numpy', 'transformers'} & sys.modules.keys())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_the_engine_core_knows_no_text():
    code = "import sys, minivllm.engine.engine_core, minivllm.engine.engine_core_proc; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    for module in ("tokenizer", "input_processor", "output_processor", "llm_engine", "async_llm_engine"):
        assert f"minivllm.engine.{module}" not in loaded
    assert not {"transformers", "tokenizers"} & loaded


def test_a_prompt_passes_through_the_files_that_the_documentation_names(llm):
    """From `LLM.generate` to the first kernel, in order; and there are few enough to read."""
    documented = re.findall(r"^\| \d+ \| `([^`]+)` \|", (ROOT.parent / "docs/architecture.md").read_text(), re.MULTILINE)
    params = SamplingParams(temperature=0, max_tokens=1)
    llm.generate("Hello", params, use_tqdm=False)  # warmed up: what is compiled is compiled
    entered: dict[str, None] = {}

    def note_calls(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event != "call" or not path.is_relative_to(ROOT):
            return
        callers = {caller.f_code.co_name for caller, _ in traceback.walk_stack(frame)}
        if not callers & {"get_rows", "_copy_rows"}:  # no kernels, though they lie among them
            entered.setdefault(path.relative_to(ROOT).as_posix())

    sys.setprofile(note_calls)
    try:
        llm.generate("The capital of France is", params, use_tqdm=False)
    finally:
        sys.setprofile(None)
    files = list(entered)
    to_the_kernel = files[: next(i for i, file in enumerate(files) if file.startswith("kernels/"))]
    assert to_the_kernel == documented
    assert len(to_the_kernel) <= 23


def test_the_llama_model_is_plain():
    """It reads like the one that lesson 02 builds; what may stand in for it is elsewhere."""
    source = (ROOT / "models/llama.py").read_text()
    assert len(source.splitlines()) <= 159 and "compile" not in source


def test_openais_protocol_knows_nothing_of_the_server():
    for path in sorted((ROOT / "entrypoints/openai").rglob("*.py")):
        for module in imported_modules(path):
            assert not module.startswith("entrypoints.") or module.startswith("entrypoints.openai"), (
                f"{path.name} imports minivllm.{module}"
            )


def test_no_file_is_longer_than_400_lines():
    lengths = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8").count("\n") for path in ROOT.rglob("*.py")}
    assert {name: count for name, count in lengths.items() if count > 400} == {}
