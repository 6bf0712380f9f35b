"""Tables of text, and the JSON files behind them."""

from __future__ import annotations

import json
import math

import minivllm
from minivllm.bench.report import format_table, quantity, report, to_json


def test_a_table_has_columns_as_wide_as_their_widest_cell():
    table = format_table(("name", "ms"), [("a long name", 1), ("b", 12345)])
    assert table.split("\n") == [
        "name            ms",
        "------------------",
        "a long name      1",
        "b            12345",
    ]
    assert format_table(("n", "ms"), [(10, 2)], left=0).split("\n")[0] == " n  ms"


def test_what_is_not_known_is_a_dash():
    assert quantity(math.nan, ".1f", " ms") == "–"
    assert quantity(2.5, ".2f", " ms") == "2.50 ms"


def test_a_list_of_numbers_takes_one_line():
    assert '"speeds": [1.5, 2, -3e-05]' in to_json({"speeds": [1.5, 2, -3e-05]})


def test_a_report_is_printed_and_saved_with_what_it_takes_to_repeat_it(capsys, tmp_path):
    file = tmp_path / "report.json"
    report("A run", "the table", {"results": [1, 2]}, file=file, command="minivllm bench offline")
    printed, saved = capsys.readouterr().out, json.loads(file.read_text())
    assert printed.strip() == "\n".join(saved["text"])
    assert saved["text"][0] == "A run" and saved["text"][-1] == "the table" and saved["machine"] in saved["text"]
    assert saved["command"] == "minivllm bench offline" and saved["results"] == [1, 2]
    assert saved["versions"]["minivllm"] == minivllm.__version__ and saved["versions"]["torch"]
    assert saved["time"].endswith("+00:00")


def test_a_report_says_what_was_refused_to_the_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIVLLM_CPU_FEATURES", "-amx-tile")
    report("A run", "the table", {}, file=tmp_path / "report.json", command="minivllm bench latency")
    assert (
        json.loads((tmp_path / "report.json").read_text())["command"] == "MINIVLLM_CPU_FEATURES=-amx-tile minivllm bench latency"
    )
