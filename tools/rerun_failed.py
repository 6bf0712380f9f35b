"""Run the tests that failed in the latest run once more, alone: `python tools/rerun_failed.py`, with options for pytest.

A test that fails among thousands on two busy cores, and passes alone, hangs on timing. It is to be mended, so this says which one it was;
but it is no reason to refuse a change. Exits with 0 if all pass now. With more than `MOST` failures it runs none: that is no chance.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST = 4
"""Tests that may have failed. Cells of a notebook count as one: each needs the cells before it, so the whole notebook runs."""


def find_failed(root: Path) -> list[str]:
    """What to run again: ids of tests, and paths of notebooks, from pytest's cache below `root`."""
    try:
        failed = json.loads((root / ".pytest_cache/v/cache/lastfailed").read_text())
    except FileNotFoundError:
        return []
    notebooks = {name.partition("::")[0] for name in failed if ".ipynb" in name}
    return sorted(notebooks) + sorted(name for name in failed if ".ipynb" not in name)


def main(arguments: list[str], root: Path = ROOT) -> int:
    """Run them with further options for pytest. Returns the exit status."""
    status = root / ".pytest_cache/v/minivllm/exit_status"
    if status.exists() and status.read_text() != "1":
        print("The latest run did not come to its end, or nothing failed in it: nothing is run again.")
        return 1
    failed = find_failed(root)
    if not failed:
        print("No test is known to have failed, so none can be run again.")
        return 1
    if len(failed) > MOST:
        print(f"{len(failed)} tests failed: too many to have failed by chance. None is run again.")
        return 1
    if all(name.endswith(".ipynb") for name in failed):  # pytest does not read tests/conftest.py, which alone knows this option
        arguments = [argument for argument in arguments if argument != "--long"]
    print("Run again, alone:", *failed, sep="\n  ", flush=True)
    command = [sys.executable, "-m", "pytest", "--nbval", "-p", "no:cacheprovider", *arguments, *failed]
    status = subprocess.run(command, cwd=root).returncode
    print(
        "\nFailed among all tests, and to be mended:" if status == 0 else "\nFailed again, or among all tests:",
        *failed,
        sep="\n  ",
    )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
