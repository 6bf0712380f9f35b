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


def load_promises():
    spec = importlib.util.spec_from_file_location("promises", ROOT / "tools/promises.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.promises()


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


def test_what_is_promised_is_still_there():
    promised = json.loads((HERE / "promises.json").read_text())
    now = load_promises()
    assert len(promised) > 50
    gone = {
        name: set(values) - set(now.get(name, []))
        for name, values in promised.items()
        if name not in now or set(values) - set(now[name])
    }
    assert not gone


def test_the_page_names_what_is_promised():
    page = (ROOT / "docs/releases.md").read_text()
    assert [name for name in minivllm.__all__ if f"`{name}`" not in page] == []


def test_a_trace_of_1_0_can_be_read(tmp_path):
    trace = EngineTrace.load(HERE / "trace_1.0.json")
    assert len(trace) == 32
    assert sum(len(step.preempted) for step in trace) == 4 and any(step.blocks_to_swap_out for step in trace)
    assert summarize_trace(trace).ttft.p50 > 0
    trace.save(tmp_path / "again.json")
    assert EngineTrace.load(tmp_path / "again.json").to_json() == trace.to_json()


@pytest.mark.parametrize("command", ["--version", "course -h", "trace diff -h"])
def test_the_command_line_needs_no_extra(command):
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
main({command.split()})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
