"""`make check-vllm-links` finds what pages say about vLLM's source, and says what is not so."""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def links():
    spec = importlib.util.spec_from_file_location("check_vllm_links", ROOT / "tools/check_vllm_links.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


CODE = """class Scheduler:
    limit: int = 3

    def schedule(self):
        # There is no phase
        # in here at all.
        self.budget = min(self.limit,
                          4)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "vllm" / "core").mkdir(parents=True)
    (tmp_path / "vllm" / "_version.py").write_text("__version__ = version = '1.2.3'\n")
    (tmp_path / "vllm" / "core" / "scheduler.py").write_text(CODE)
    return tmp_path


def problems_of(links, folder, text):
    page = folder / "page.md"
    page.write_text(text)
    return links.check([page], [links.open_source(folder)])[0]


@pytest.mark.parametrize(
    "said",
    [
        "In vLLM 1.2.3 it is in `vllm/core/scheduler.py`.",
        "(1.2.3, `schedule` in `vllm/core/scheduler.py`)",
        "(1.2.3, `Scheduler.schedule` and `limit` in `vllm/core/scheduler.py`)",
        "(1.2.3, `schedule()` in\n`vllm/core/scheduler.py`)",
        "It says `There is no phase in here at all.` in `vllm/core/scheduler.py` (1.2.3).",
        "(1.2.3, `self.budget = min(self.limit, 4)` in `vllm/core/scheduler.py`)",
        "This is vLLM 1.2.3.\n\n- One.\n- `budget` in `vllm/core/scheduler.py`.",
    ],
)
def test_what_is_so_is_no_problem(links, folder, said):
    assert problems_of(links, folder, said) == []


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ("(1.2.3, `vllm/core/sched.py`)", "there is no vllm/core/sched.py in vLLM 1.2.3"),
        ("(1.2.3, `admit` in `vllm/core/scheduler.py`)", "`admit` is not in vllm/core/scheduler.py of vLLM 1.2.3"),
        ("(1.2.3, `limit` and `phase` in `vllm/core/scheduler.py`)", "`phase` is not in"),
        ("(1.2.3, `self.budget = 4` in `vllm/core/scheduler.py`)", "`self.budget = 4` is not in"),
        ("It is in `vllm/core/scheduler.py`.", "is named without a version"),
        ("It is in `vllm/core/scheduler.py`.\n\nThis is vLLM 1.2.3.", "is named without a version"),
    ],
)
def test_what_is_not_so_is_told(links, folder, said, problem):
    problems = problems_of(links, folder, said)
    assert len(problems) == 1 and problem in problems[0]


def test_files_of_this_project_are_not_vllms(links, folder):
    assert problems_of(links, folder, "`minivllm/core/scheduler.py`, `schedule` in `minivllm/x.py`") == []


def test_cells_of_notebooks_are_read_one_by_one(links, folder):
    cells = [
        {"cell_type": "markdown", "id": "one", "source": ["This is vLLM 1.2.3: ", "`vllm/none.py`"]},
        {"cell_type": "code", "id": "two", "source": "# `vllm/none.py`"},
        {"cell_type": "markdown", "id": "three", "source": "`vllm/core/scheduler.py`"},
    ]
    page = folder / "page.ipynb"
    page.write_text(json.dumps({"cells": cells}))
    problems = links.check([page], [links.open_source(folder)])[0]
    assert [problem.split(": ")[0].split(", ")[-1] for problem in problems] == ["cell one", "cell three"]


def test_a_wheel_is_read_like_a_folder(links, folder):
    wheel = folder / "vllm-1.2.3.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (folder / "vllm").rglob("*.py"):
            archive.write(path, path.relative_to(folder).as_posix())
    source = links.open_source(wheel)
    assert source.version == "1.2.3"
    assert source.read("vllm/core/scheduler.py") == CODE
    assert source.read("vllm/none.py") is None


def test_statements_about_another_version_are_counted_not_checked(links, folder):
    page = folder / "page.md"
    page.write_text("(0.6.6, `vllm/none.py`) and (1.2.3, `vllm/core/scheduler.py`)")
    assert links.check([page], [links.open_source(folder)]) == ([], 1, {"0.6.6": 1})


def test_a_folder_without_vllm_is_refused(links, tmp_path):
    with pytest.raises(ValueError, match="names a version"):
        links.open_source(tmp_path)


def test_every_statement_of_the_lessons_has_a_version(links):
    pages = [page for place in links.PLACES for page in ROOT.glob(place)]
    assert links.check(pages, [])[0] == []
