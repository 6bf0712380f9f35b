"""One engine in a process of its own: the other side of `engine_process.py`.

It runs in environments that need not have minivllm, so it imports the standard library and the one engine that it is asked for. It reads
JSON lines from standard input and answers each with one on standard output: first the settings (answered when the engine is loaded),
then a list of requests for each run. What the engine prints goes to standard error. All engines take and return token ids, greedily, past
end-of-sequence tokens.

    python engine_script.py vllm           # serve
    python engine_script.py vllm --check   # print the versions of its packages, or what is missing
"""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
import traceback
from typing import Any

Tokens = list[int]
Requests = list[tuple[Tokens, int]]
"""Prompt, and how many tokens to generate."""


class MinivllmEngine:
    """This project's engine, with `engine_args`."""

    how = "continuous batching, paged KV cache"

    def __init__(self, settings: dict[str, Any]) -> None:
        from minivllm.config import EngineArgs
        from minivllm.engine.llm_engine import LLMEngine

        self.engine = LLMEngine.from_engine_args(EngineArgs(**settings["engine_args"], skip_tokenizer_init=True))

    def run(self, requests: Requests) -> list[Tokens]:
        """Generate for all requests. Returns the tokens of each."""
        from minivllm.sampling_params import SamplingParams

        for i, (prompt, output_len) in enumerate(requests):
            self.engine.add_request(str(i), prompt, SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True))
        tokens: list[Tokens] = [[] for _ in requests]
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                if output.finished:
                    tokens[int(output.request_id)] = output.outputs[0].token_ids
        return tokens


class TransformersStatic:
    """transformers' `generate`: batches in workload order, left-padded, each run to its longest output."""

    how = "static batches, each as long as its longest output; only the tokens asked for are counted"

    def __init__(self, settings: dict[str, Any]) -> None:
        self.model = load_transformers(settings["model"])
        self.batch_size = settings["max_num_seqs"]

    def run(self, requests: Requests) -> list[Tokens]:
        """Generate for all requests. Returns the tokens of each."""
        batches = (requests[i : i + self.batch_size] for i in range(0, len(requests), self.batch_size))
        return [tokens for batch in batches for tokens in self._run_batch(batch)]

    def _run_batch(self, batch: Requests) -> list[Tokens]:
        import torch

        width = max(len(prompt) for prompt, _ in batch)
        padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in batch])
        longest = max(output_len for _, output_len in batch)
        output = self.model.generate(padded, attention_mask=mask, do_sample=False, max_new_tokens=longest, pad_token_id=0)
        return [row[width : width + output_len].tolist() for row, (_, output_len) in zip(output, batch, strict=True)]


class TransformersContinuous:
    """transformers' continuous batching, through the manager under `generate_batch`.

    `generate_batch` takes one output length for all requests; the manager's `add_request` takes one for each. The cache has room for all
    requests that may run at once.
    """

    how = "continuous batching; each request ends at its own length (ContinuousBatchingManager.add_request)"

    def __init__(self, settings: dict[str, Any]) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        model = load_transformers(settings["model"])
        page_size = 256
        pages = -(-settings["max_model_len"] // page_size)
        config = ContinuousBatchingConfig(
            page_size=page_size,
            num_blocks=settings["max_num_seqs"] * pages,
            max_batch_tokens=max(2048, settings["max_model_len"]),
            max_requests_per_batch=settings["max_num_seqs"],
            allow_block_sharing=False,
        )
        generation_config = GenerationConfig(do_sample=False, eos_token_id=-1)
        self.manager = model.init_continuous_batching(generation_config, config)
        self.manager.start()

    def run(self, requests: Requests) -> list[Tokens]:
        """Generate for all requests. Returns the tokens of each."""
        ids = [self.manager.add_request(prompt, max_new_tokens=output_len, eos_token_id=-1) for prompt, output_len in requests]
        outputs = {}
        while len(outputs) < len(ids):
            result = self.manager.get_result(timeout=1)
            if result is None and not self.manager.is_running():
                raise RuntimeError("transformers' generation thread has ended")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(result.error)
                outputs[result.request_id] = result.generated_tokens
        return [outputs[request_id] for request_id in ids]


class VllmEngine:
    """vLLM in float32 or bfloat16, compiled unless `enforce_eager` is set.

    By default vLLM reserves a core for its scheduler, a great loss on few cores: all cores are used unless VLLM_CPU_NUM_OF_RESERVED_CPU or
    VLLM_CPU_OMP_THREADS_BIND say otherwise. It also runs in this process unless VLLM_ENABLE_V1_MULTIPROCESSING says otherwise: by default
    it has an engine process, which would compete with the workers for the cores.
    """

    how = "continuous batching, paged KV cache"

    def __init__(self, settings: dict[str, Any]) -> None:
        if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM

        self.llm = LLM(
            settings["model"],
            dtype=settings["dtype"],
            enforce_eager=settings["enforce_eager"],
            max_num_seqs=settings["max_num_seqs"],
            max_model_len=settings["max_model_len"],
            kv_cache_memory_bytes=settings["kv_cache_memory_bytes"],
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )
        chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("VLLM_CPU_", "VLLM_ENABLE_"))}
        mode = "eager" if settings["enforce_eager"] else "compiled"
        self.how = ", ".join([VllmEngine.how, settings["dtype"], mode, *(f"{name}={value}" for name, value in chosen.items())])

    def run(self, requests: Requests) -> list[Tokens]:
        """Generate for all requests. Returns the tokens of each."""
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in requests]
        return [list(output.outputs[0].token_ids) for output in self.llm.generate(prompts, params, use_tqdm=False)]


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level interface: the GGUF file itself, in batches as llama.cpp's own server makes them.

    Each request that runs has a slot. In a step, the last tokens of those that generate come first, then as much of the prompts as there is
    room for.
    """

    how = "the GGUF file's own quantization, continuous batching"

    def __init__(self, settings: dict[str, Any]) -> None:
        import llama_cpp

        self.api = llama_cpp
        self.api.llama_backend_init()
        self.model = self.api.llama_model_load_from_file(settings["gguf"].encode(), self.api.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot read {settings['gguf']}")
        params = self.api.llama_context_default_params()
        self.num_slots = params.n_seq_max = settings["max_num_seqs"]
        params.n_ctx = settings["max_num_seqs"] * settings["max_model_len"]
        params.kv_unified = False  # faster for sequences that share nothing
        params.flash_attn_type = self.api.LLAMA_FLASH_ATTN_TYPE_DISABLED  # faster on a CPU, where we tried it
        params.n_threads = params.n_threads_batch = settings["num_threads"]
        self.room = params.n_batch
        self.context = self.api.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context: there may be too little memory")
        self.memory = self.api.llama_get_memory(self.context)
        self.batch = self.api.llama_batch_init(self.room, 0, 1)
        self.vocab_size = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))

    def run(self, requests: Requests) -> list[Tokens]:
        """Generate for all requests. Returns the tokens of each."""
        tokens: list[Tokens] = [[] for _ in requests]
        waiting = list(range(len(requests)))[::-1]
        running: dict[int, tuple[int, Tokens, int]] = {}  # slot: request, tokens to compute, position of the first of them
        while waiting or running:
            for slot in range(self.num_slots):
                if waiting and slot not in running:
                    request = waiting.pop()
                    running[slot] = request, requests[request][0], 0
            for slot, token in self._step(running).items():
                request, _, position = running[slot]
                tokens[request].append(token)
                if len(tokens[request]) < requests[request][1]:
                    running[slot] = request, [token], position
                else:
                    del running[slot]
                    self.api.llama_memory_seq_rm(self.memory, slot, -1, -1)
        return tokens

    def _step(self, running: dict[int, tuple[int, Tokens, int]]) -> dict[int, int]:
        """One step. Returns the next token of each slot that has one."""
        import numpy as np

        batch, last_rows = self.batch, {}
        batch.n_tokens = 0
        for slot, (request, tokens, position) in sorted(running.items(), key=lambda item: len(item[1][1]) > 1):
            now = tokens[: self.room - batch.n_tokens]
            for i, token in enumerate(now):
                row = batch.n_tokens
                batch.token[row], batch.pos[row] = token, position + i
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, slot
                batch.logits[row] = i == len(tokens) - 1
                batch.n_tokens += 1
            running[slot] = request, tokens[len(now) :], position + len(now)
            if len(now) == len(tokens):
                last_rows[slot] = batch.n_tokens - 1
        if status := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        logits = {slot: self.api.llama_get_logits_ith(self.context, row) for slot, row in last_rows.items()}
        return {slot: int(np.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for slot, row in logits.items()}


def load_transformers(folder: str) -> Any:
    """A float32 model without end-of-sequence token."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


ENGINES: dict[str, tuple[type, tuple[str, ...], tuple[str, ...]]] = {
    "minivllm": (MinivllmEngine, ("minivllm",), ("torch",)),
    "transformers-static": (TransformersStatic, ("transformers",), ("transformers", "torch")),
    "transformers-continuous": (TransformersContinuous, ("transformers",), ("transformers", "torch")),
    "vllm": (VllmEngine, ("vllm",), ("vllm", "vllm-cpu", "torch")),
    "llama.cpp": (LlamaCpp, ("llama_cpp",), ("llama-cpp-python",)),
}
"""Kind of engine: its class, the modules it needs, and the packages whose versions are reported."""


def find_versions(kind: str) -> dict[str, Any]:
    """The versions of an engine's packages, or {"missing": module}."""
    _, modules, packages = ENGINES[kind]
    for module in modules:
        if importlib.util.find_spec(module) is None:
            return {"missing": module}
    versions = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # vLLM's CPU build is called vllm-cpu
    return {"versions": versions}


def serve(kind: str) -> int:
    """Answer lines until standard input closes."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for what else writes to standard output, here or in children

    def answer(**content: Any) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    try:
        settings = json.loads(sys.stdin.readline())
        start = time.perf_counter()
        engine = ENGINES[kind][0](settings)
        answer(load_seconds=time.perf_counter() - start, how=engine.how)
        for line in sys.stdin:
            requests = [(prompt, output_len) for prompt, output_len in json.loads(line)]
            gc.collect()
            start = time.perf_counter()
            tokens = engine.run(requests)
            answer(seconds=time.perf_counter() - start, tokens=tokens)
    except Exception as error:  # each engine has its own kinds; the parent reports it
        traceback.print_exc()
        answer(error=f"{type(error).__name__}: {error}")
        return 1
    return 0


def main(arguments: list[str]) -> int:
    """Serve, or with --check report what is installed."""
    kind, *rest = arguments
    if rest == ["--check"]:
        print(json.dumps(find_versions(kind)))
        return 0
    return serve(kind)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: its modules are not those that an engine means
    sys.exit(main(sys.argv[1:]))
