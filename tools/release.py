"""Builds a release in dist/: the sdist, and the wheel that is made from it, both with the playground. `make release` runs it.

They are made from the files that git tracks, in a folder of their own, so that nothing else gets in.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLAYGROUND = ROOT / "out/book/html/playground"
SITE = "minivllm/entrypoints/playground/built"  # `course play` of an installed package serves it


def main() -> int:
    """Builds both files, and says where they are."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist", metavar="FOLDER", help="where they go (default: dist)")
    output = parser.parse_args().output
    if not (PLAYGROUND / "files.json").is_file():
        print("The release contains the playground: run `make book` first.")
        return 1
    if changes := git("status", "--porcelain"):
        print(f"Not to be uploaded, because it is of no commit. Changed, or unknown to git:\n{changes.rstrip()}")
    if "REPOSITORY_URL" in (ROOT / "README.md").read_text(encoding="utf-8"):
        print(
            "Not to be uploaded: README.md, which is the page of the package, has REPOSITORY_URL in place of the repository's address."
        )
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "minivllm"
        for name in filter(None, git("ls-files", "-z").split("\0")):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
        shutil.copytree(PLAYGROUND, tree / SITE)
        for path in output.glob("minivllm-*"):  # an earlier version's
            path.unlink()
        built = subprocess.run(
            [sys.executable, "-m", "build", "--outdir", str(output.resolve()), str(tree)], capture_output=True, text=True
        )
    if built.returncode != 0:
        print(built.stdout[-4000:], built.stderr[-4000:])
        return 1
    for path in sorted(output.iterdir()):
        print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


def git(*arguments: str) -> str:
    """What git says of this repository, whoever owns it."""
    command = ["git", "-c", "safe.directory=*", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    raise SystemExit(main())
