"""What a release says of itself agrees, what earlier ones promised still holds, and the command line needs none of the extras.

`tools/check_release.py` installs one in an empty environment.
"""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import minivllm
from minivllm.bench.trace_summary import summarize_trace
from minivllm.engine.trace import EngineTrace

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


spec = importlib.util.spec_from_file_location("public_api", ROOT / "tools/public_api.py")
public_api = importlib.util.module_from_spec(spec)
spec.loader.exec_module(public_api)


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = re.search(r"^## \[(\d.*?)\] - ([\d-]+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released.groups() == (minivllm.__version__, str(citation["date-released"]))
    assert citation["version"] == minivllm.__version__
    assert f"minivllm-{minivllm.__version__}-py3-none-any.whl" in (ROOT / "docs/releases.md").read_text()


def test_the_citation_has_what_the_format_asks_for():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["license"] == "Apache-2.0"


@pytest.mark.parametrize("path", sorted(HERE.glob("public_api_*.json")), ids=lambda path: path.stem)
def test_nothing_of_an_earlier_public_api_has_changed(path):
    assert public_api.breaks(json.loads(path.read_text()), public_api.public_api()) == []


def test_what_would_break_a_program_is_found():
    old = json.loads((HERE / "public_api_1.0.json").read_text())
    assert len(old) > 60 and public_api.breaks(old, old) == []

    def broken(change):
        new = json.loads(json.dumps(old))
        change(new)
        return public_api.breaks(old, new)

    def changed(name, part, **about):
        return broken(lambda api: api[name].setdefault(part, {}).update(about))

    assert broken(lambda api: api.pop("LLM.chat")) == ["LLM.chat is gone."]
    assert broken(lambda api: api["HTTP"].pop("GET /health")) == ["HTTP: GET /health is gone."]
    assert changed("EngineArgs", "block_size", default="32") == ["EngineArgs: the default of block_size was 16, and is 32."]
    assert changed("LLM.generate", "prompts", place=1) == ["LLM.generate: the place of prompts was 0, and is 1."]
    assert changed("LLM.generate", "mood", required=True) == ["LLM.generate: mood is new, and must be given."]
    assert changed("LLM.generate", "mood", default="'good'") == []
    assert changed("LLM.generate", "sampling_params", required=True) == ["LLM.generate: sampling_params must be given now."]
    assert changed("LLM.generate", "()", iscoroutinefunction=True) == ["LLM.generate is called in another way."]
    assert changed("HTTP CompletionRequest", "prompt", required=False) == []
    assert changed("minivllm serve", "--port", type="str") == ["minivllm serve: the type of --port was int, and is str."]
    assert changed("minivllm serve", "--port", choices=["80"]) == ["minivllm serve: --port takes only 80 now."]
    assert changed("minivllm trace export", "--to", choices=["other"]) == [
        "minivllm trace export: --to does not take chrome any more."
    ]
    assert changed("minivllm trace export", "--to", choices=[]) == []
    assert changed("metrics", "minivllm:num_requests_running", type="counter")


def test_the_page_names_what_is_promised():
    page = (ROOT / "docs/releases.md").read_text()
    methods = {f"{name}.{method}" for name, methods in public_api.METHODS.items() for method in methods}
    assert [name for name in {*minivllm.__all__, *methods} if f"`{name}`" not in page] == []


@pytest.mark.parametrize("path", sorted(HERE.glob("trace_*.json")), ids=lambda path: path.stem)
def test_a_trace_of_an_earlier_release_can_be_read(path, tmp_path):
    trace = EngineTrace.load(path)
    assert any(step.preempted for step in trace) and any(step.blocks_to_swap_out for step in trace)
    assert summarize_trace(trace).ttft.p50 > 0
    trace.save(tmp_path / "again.json")
    assert EngineTrace.load(tmp_path / "again.json").to_json() == trace.to_json()


@pytest.mark.parametrize(
    ("command", "status"), [("--version", 0), ("course -h", 0), ("trace diff -h", 0), ("course", 2), ("course export {}", 2)]
)
def test_the_command_line_needs_no_extra_or_names_it(command, status, tmp_path):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    packages = {Requirement(line).name.replace("-", "_") for lines in extras.values() for line in lines}
    code = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages | {"IPython", "yaml"}}:
            raise ModuleNotFoundError("No module named " + name, name=name)
sys.meta_path.insert(0, Missing())
from minivllm.entrypoints.cli.main import main
sys.exit(main({command.format(tmp_path / "new").split()}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    if status:
        assert re.fullmatch(r'minivllm: The course needs \w+: `pip install "minivllm\[course\]"`\.\n', done.stderr)
