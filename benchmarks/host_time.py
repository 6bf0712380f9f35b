"""What a decode step costs on the host: the whole engine, over a device that computes nothing.

python benchmarks/host_time.py --json benchmarks/results/host_time_DATE.json

The model returns rows of zeros at once, so that all that is left is Python and small tensors: scheduling, laying out the batch, sampling's
preparation, updates, outputs. Times are of the processor, of one thread, so that other programs on the machine matter little.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
from stopwatch import Stopwatch
from torch import Tensor

from minivllm.bench.report import format_table, report
from minivllm.config import CacheConfig, EngineArgs, ModelConfig, SchedulerConfig
from minivllm.core.scheduler import Scheduler
from minivllm.engine.core_messages import decode_from_core, encode
from minivllm.engine.detokenizer import IncrementalDetokenizer
from minivllm.engine.engine_config import EngineConfig
from minivllm.engine.engine_core import EngineCore
from minivllm.engine.llm_engine import LLMEngine
from minivllm.engine.output_processor import OutputProcessor
from minivllm.engine.tokenizer import Tokenizer
from minivllm.executor.base import Executor
from minivllm.layers.attention import AttentionMetadata, KVCache
from minivllm.models.base import CausalLM
from minivllm.sampling_params import RequestOutputKind, SamplingParams
from minivllm.scheduler_output import ExecuteModelRequest, SchedulerOutput, SequenceOutput
from minivllm.worker.model_runner import ModelRunner

BLOCK_SIZE, PROMPT_TOKENS, VOCAB_SIZE = 16, 128, 64
PARTS = {
    "schedule": [(Scheduler, "schedule")],
    "request for the worker": [(SchedulerOutput, "to_request")],
    "prepare inputs": [(ModelRunner, "prepare_inputs")],
    "sample": [(ModelRunner, "_sample")],
    "update": [(Scheduler, "update")],
    "outputs of the core": [(EngineCore, "update"), (EngineCore, "report")],
    "outputs": [(LLMEngine, "step"), (OutputProcessor, "process_outputs")],
    "other": [(EngineCore, "step")],
}
"""The methods whose own time, without that of methods further up or down in this table, counts for a part. Each is called once or twice in a
step, or the stopwatch would measure itself."""


class NoModel(CausalLM):
    """Computes nothing, at once."""

    def __init__(self) -> None:
        torch.nn.Module.__init__(self)

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: AttentionMetadata) -> Tensor:
        return torch.zeros(len(input_ids), 1)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return torch.zeros(len(hidden), VOCAB_SIZE)


class NoDevice(Executor):
    """The real model runner, over a model and a cache of nothing."""

    in_process = True

    def __init__(self, num_blocks: int, max_model_len: int) -> None:
        self.num_blocks = num_blocks
        self.runner = ModelRunner(NoModel(), BLOCK_SIZE, max_model_len, torch.device("cpu"))
        cache = torch.empty(num_blocks, 0)
        self.kv_caches = [(cache, cache)]

    def determine_num_available_blocks(self) -> tuple[int, int]:
        return self.num_blocks, 0

    def initialize_cache(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        pass

    def execute_model(self, request: ExecuteModelRequest) -> list[SequenceOutput]:
        return self.runner.execute_model(request.sequences, self.kv_caches) if request.sequences else []


def make_engine(num_seqs: int, num_steps: int) -> LLMEngine:
    """An engine for so many sequences and steps."""
    max_len = PROMPT_TOKENS + num_steps + 1
    model = ModelConfig("nothing", Path(), "NoModel", {}, 1, 1, 1, 1, VOCAB_SIZE, max_len, ())
    num_blocks = num_seqs * -(-max_len // BLOCK_SIZE)
    scheduler = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=max(8192, max_len))
    cache = CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=num_blocks)
    return LLMEngine.from_executor(model, cache, scheduler, NoDevice(num_blocks, max_len))


def measure(num_seqs: int, temperature: float, num_steps: int = 120) -> dict[str, float]:
    """Milliseconds of a decode step by part, medians over the steps.

    "a step" is without the stopwatch, and of token ids alone; "text" is what the text of its tokens would add, and "messages" what a core in a
    process of its own would.
    """
    params = SamplingParams(temperature=temperature, max_tokens=num_steps, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    totals: list[float] = []
    parts: dict[str, list[float]] = defaultdict(list)
    for is_timed in (False, True):
        engine = make_engine(num_seqs, num_steps)
        for number in range(num_seqs):
            engine.add_request(str(number), [number % VOCAB_SIZE] * PROMPT_TOKENS, params)
        while engine.scheduler.waiting:
            engine.step()
        with ExitStack() as stack:
            watch = Stopwatch(time.thread_time)
            if is_timed:
                for part, methods in PARTS.items():
                    for owner, name in methods:
                        stack.enter_context(mock.patch.object(owner, name, _as_method(watch.timed(part, getattr(owner, name)))))
            for _ in range(num_steps // 2):
                watch.take()
                begin = time.thread_time()
                engine.step()
                totals += [] if is_timed else [time.thread_time() - begin]
                for part, seconds in watch.take()[0].items():
                    parts[part] += [seconds] if is_timed else []
    result = {part: 1e3 * statistics.median(parts[part]) for part in PARTS}
    beside = {"text": _measure_text(num_seqs), "messages": _measure_messages(num_seqs, params)}
    return {"a step": 1e3 * statistics.median(totals), **result, **beside}


def _as_method(function: Callable) -> Callable:
    return lambda self, *args, **kwargs: function(self, *args, **kwargs)


@functools.cache
def load_tokenizer() -> Tokenizer:
    """The default model's."""
    return EngineConfig.from_engine_args(EngineArgs()).load_tokenizer()


def _measure_text(num_seqs: int) -> float:
    """Milliseconds to add a token to so many texts, which begin at different places of this repository's README."""
    tokenizer, seconds = load_tokenizer(), []
    token_ids = tokenizer.encode((Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8"))
    texts = [IncrementalDetokenizer(tokenizer, token_ids[:8], SamplingParams()) for _ in range(num_seqs)]
    for step in range(40):
        new = [token_ids[(17 * place + step) % len(token_ids)] for place in range(num_seqs)]
        begin = time.thread_time()
        for text, token_id in zip(texts, new, strict=True):
            text.update(token_id)
        seconds.append(time.thread_time() - begin)
    return 1e3 * statistics.median(seconds)


def _measure_messages(num_seqs: int, params: SamplingParams) -> float:
    """Milliseconds to encode a step's outputs, and to decode them."""
    engine = make_engine(num_seqs, 8)
    for number in range(num_seqs):
        engine.add_request(f"cmpl-{number:032x}", [1] * 8, params)
    while engine.scheduler.waiting:
        outputs = engine.core.step()
    outputs, seconds = engine.core.step(), []
    for _ in range(40):
        begin = time.thread_time()
        decode_from_core(encode(outputs))
        seconds.append(time.thread_time() - begin)
    return 1e3 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[16, 64, 256, 1024], help="batch sizes (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.6], help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # as servers do, or the garbage collector would look through all that is loaded now and then
    runs = {(count, t): measure(count, t) for t in arguments.temperature for count in arguments.sequences}
    headers = ("ms of a decode step", *[f"{count} at {t:g}" for count, t in runs])
    parts = list(next(iter(runs.values())))
    rows = [(part, *[f"{run[part]:.2f}" for run in runs.values()]) for part in parts]
    content = [{"sequences": count, "temperature": t, "milliseconds": run} for (count, t), run in runs.items()]
    report("Host time of a decode step", format_table(headers, rows), {"results": content}, file=arguments.json)


if __name__ == "__main__":
    main()
