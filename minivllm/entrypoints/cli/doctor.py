"""`minivllm doctor`: what this machine can do, and how to fix what it cannot."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from minivllm import __version__
from minivllm.errors import ModelLoadError


def examine() -> int:
    """Print one line per check. Returns 0 if the default model can run here, else 1."""
    import torch

    from minivllm.bench.report import processor_name
    from minivllm.layers.attention_backends import BACKENDS, get_attention_backend
    from minivllm.layers.platform import describe_cpu_kernels
    from minivllm.models.gguf_files import cache_folder
    from minivllm.worker.memory import available_cpu_memory
    from minivllm.worker.worker import resolve_device

    def line(label: str, text: str) -> None:
        print(f"{label + ':':<14}{text}")

    line("minivllm", f"{__version__}, Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    line("libraries", ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers", "tokenizers", "gguf", "numba")))
    line("processor", f"{processor_name()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")
    line("ranks", _ranks())
    line("memory", f"{available_cpu_memory() / 2**30:.1f} GiB free for this process")
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        line("GPU", f"{torch.cuda.get_device_name()}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free; device='auto' uses it")
    else:
        line("GPU", "none that PyTorch can use; everything runs on the CPU")
    line("Triton", _triton(torch.cuda.is_available()))
    backend = get_attention_backend("auto", resolve_device("auto"))
    backend_name = next(name for name, cls in BACKENDS.items() if cls is backend)
    line("attention", f"attention_backend='auto' selects {backend_name!r}")
    line("CPU kernels", describe_cpu_kernels())
    line("model", _model(torch.cuda.is_available(), backend_name))
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shown = f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else folder
        line("model cache", f"{shown} ({shutil.disk_usage(folder).free / 2**30:.0f} GiB free on its disk)")
    except OSError as error:
        line("model cache", f"{folder} CANNOT BE USED ({error.strerror}): set MINIVLLM_CACHE to another folder.")
        return 1
    try:
        line("smollm2-135m", _default_model())
    except ModelLoadError as error:
        line("smollm2-135m", f"NOT FOUND. {error}")
        return 1
    print('\nAll is well: try `minivllm generate "The capital of France is"`.')
    return 0


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(missing)"


def _ranks() -> str:
    """How many tensor-parallel ranks make sense."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus > 1:
        return f"tensor_parallel_size up to {gpus}, one rank for each GPU"
    if gpus == 1:
        return "tensor_parallel_size=1; more ranks would share the one GPU"
    threads = torch.get_num_threads()
    if threads == 1:
        return "tensor_parallel_size=1; more ranks would share the one core"
    return f"tensor_parallel_size up to {threads}, one core for each rank; one worker with all cores is about as fast"


def _triton(has_gpu: bool) -> str:
    try:
        found = version("triton")
    except PackageNotFoundError:
        return "not installed (it is available for Linux only)"
    return (
        f"{found}, compiles kernels for the GPU"
        if has_gpu
        else f"{found}; without a GPU, its kernels run interpreted (TRITON_INTERPRET=1)"
    )


def _model(has_gpu: bool, backend: str) -> str:
    """How a model's layers run."""
    if has_gpu and backend == "triton":
        return "decodes, and small steps with prompts, replay CUDA graphs; LLM(enforce_eager=True) runs the code in minivllm/models as it is written"
    if backend == "cpu":
        return "Llama's layers run as one compiled call; LLM(enforce_eager=True) runs minivllm/models/llama.py as it is written"
    return "runs as it is written in minivllm/models"


def _default_model() -> str:
    from minivllm.models.gguf_files import find_conversion
    from minivllm.models.hub import PACKAGED_MODELS, find_packaged_file

    model = PACKAGED_MODELS["smollm2-135m"]
    converted = find_conversion(find_packaged_file(model)).exists()
    return f"in the package {model.requirement}, {'converted' if converted else 'to be converted on first use'}"
