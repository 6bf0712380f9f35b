"""The JSON-Schema-Test-Suite as structured outputs: which of its schemas compile, and whether what they let through validates.

    pip download --no-deps --no-binary jsonschema jsonschema==4.26.0 && tar xzf jsonschema-4.26.0.tar.gz
    python benchmarks/json_schema_suite.py jsonschema-4.26.0/json/tests/draft{7,2019-09,2020-12} --json suite.json

The suite comes with the source of jsonschema (MIT licence). Each schema gets random walks: any token that the mask allows, and the end of the
text, where it is allowed, with every third token. What reaches its end must validate. And for each instance of the suite, the grammar should take
its JSON exactly if it is valid. It is stricter than the schema where JSON leaves a choice: the order of properties, spaces, duplicates.

With --engine xgrammar the same is asked of xgrammar, which vLLM tries first, for comparison (pip install --no-deps xgrammar apache-tvm-ffi).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import referencing.exceptions
from tqdm import tqdm

from minivllm.bench.report import format_table, report
from minivllm.core.structured_output import GrammarCompiler, StructuredOutputGrammar
from minivllm.engine.tokenizer import Tokenizer
from minivllm.errors import RequestError
from minivllm.models.hub import resolve_model
from minivllm.sampling_params import StructuredOutputsParams
from minivllm.worker.sampler import allowed_tokens

EOS, VOCAB_SIZE = 2, 49152
NUM_WALKS, WALK_TOKENS = 3, 150


class XGrammar:
    """A matcher of xgrammar, with the methods of `StructuredOutputGrammar` that are used here."""

    error = None

    def __init__(self, compiled: Any) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._mask = xgrammar.allocate_token_bitmask(1, VOCAB_SIZE)

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_terminated()

    def masks(self) -> list[bytes]:
        self._matcher.fill_next_token_bitmask(self._mask)
        return [self._mask.numpy().tobytes()]

    def accept_token(self, token_id: int) -> bool:
        return self._matcher.accept_token(token_id) and not self.is_terminated

    def count_valid(self, token_ids: list[int]) -> int:
        num_valid = next((i for i, token_id in enumerate(token_ids) if not self._matcher.accept_token(token_id)), len(token_ids))
        if num_valid:
            self._matcher.rollback(num_valid)
        return num_valid


class XGrammarCompiler:
    """Compiles with xgrammar, and remembers as `GrammarCompiler` does."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        import xgrammar
        from transformers import AutoTokenizer

        info = xgrammar.TokenizerInfo.from_huggingface(
            AutoTokenizer.from_pretrained(folder), vocab_size=vocab_size, stop_token_ids=[EOS]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def compile(self, params: StructuredOutputsParams, eos_token_ids: tuple[int, ...]) -> XGrammar:
        # At most 16 spaces and new lines between two parts, or walks would consist of nothing else. Not its strict mode, which forbids
        # properties that the schema does not name.
        try:
            return XGrammar(self._compiler.compile_json_schema(params.json, max_whitespace_cnt=16, strict_mode=False))
        except RuntimeError as error:
            raise RequestError(str(error)) from None


Compiler = GrammarCompiler | XGrammarCompiler
ENGINES: dict[str, type[Compiler]] = {"llguidance": GrammarCompiler, "xgrammar": XGrammarCompiler}


KNOWN = (("draft7", "ref 6"), ("draft2019-09", "format 9"), ("draft2020-12", "format 9"))
"""Schemas whose walks may be not valid: `$id` beside `$ref`, which draft 7 ignores; a time of day that ends in a lower-case z."""


class Stopwatch:
    """How long masks take, in microseconds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def mask(self, grammar: StructuredOutputGrammar | XGrammar) -> bytes:
        begin = time.perf_counter()
        [mask] = grammar.masks()
        self.times.append(1e6 * (time.perf_counter() - begin))
        return mask


def walk(compiler: Compiler, wanted: StructuredOutputsParams, rng: random.Random, watch: Stopwatch) -> list[int] | None:
    """Random tokens of a grammar; None if they do not end in time."""
    grammar, token_ids = compiler.compile(wanted, (EOS,)), []
    while len(token_ids) < WALK_TOKENS:
        allowed = allowed_tokens(watch.mask(grammar), VOCAB_SIZE)
        if allowed[EOS] and (rng.random() < 0.3 or allowed.sum() == 1):
            return token_ids
        allowed[EOS] = False
        token_ids.append(rng.choice(allowed.nonzero().flatten().tolist()))
        if not grammar.accept_token(token_ids[-1]):
            return token_ids if grammar.error is None else None
    return None


VALIDATORS = {
    "draft7": jsonschema.Draft7Validator,
    "draft2019-09": jsonschema.Draft201909Validator,
    "draft2020-12": jsonschema.Draft202012Validator,
}


def is_valid(draft: str, schema: Any, text: str) -> bool:
    """Whether a text is JSON of a schema. If the schema refers to another document, nothing is: it should have been refused."""
    try:
        VALIDATORS[draft](schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))
    except (jsonschema.ValidationError, referencing.exceptions.Unresolvable, ValueError):
        return False
    return True


def takes(compiler: Compiler, wanted: StructuredOutputsParams, token_ids: list[int]) -> bool:
    """Whether a grammar takes these tokens and the end after them."""
    grammar = compiler.compile(wanted, (EOS,))
    if grammar.count_valid(token_ids) < len(token_ids):
        return False
    for token_id in token_ids:
        grammar.accept_token(token_id)
    return grammar.is_terminated or bool(allowed_tokens(grammar.masks()[0], VOCAB_SIZE)[EOS])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help=f"of the suite, named {', '.join(VALIDATORS)}")
    parser.add_argument("--engine", choices=ENGINES, default="llguidance", help="the project's (llguidance), or another")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()

    model = resolve_model("smollm2-135m")
    compiler: Compiler = ENGINES[arguments.engine](model, VOCAB_SIZE)
    tokenizer, rng, watch = Tokenizer(model), random.Random(0), Stopwatch()
    groups = [
        (folder.name, f"{file.stem} {number}", group)
        for folder in arguments.folders
        for file in sorted(folder.glob("*.json"))
        for number, group in enumerate(json.loads(file.read_text()))
    ]
    compiler.compile(StructuredOutputsParams(json="{}"), (EOS,))  # llguidance reads the tokenizer now, xgrammar has read it
    counts: Counter[str] = Counter()
    wrong, refusals, compilations = [], Counter[str](), []
    for draft, name, group in tqdm(groups, dynamic_ncols=True):
        schema = group["schema"]
        counts["schemas"] += 1
        if not isinstance(schema, dict):
            counts["not an object, which the API does not take"] += 1
            continue
        wanted = StructuredOutputsParams(json=schema)
        begin = time.perf_counter()
        try:
            compiler.compile(wanted, (EOS,))
        except RequestError as error:
            counts["refused, with the cause"] += 1
            refusals[str(error).removeprefix("structured_outputs cannot be compiled: ")[:60]] += 1
            continue
        compilations.append(1e3 * (time.perf_counter() - begin))
        counts["compiled"] += 1
        for _ in range(NUM_WALKS):
            token_ids = walk(compiler, wanted, rng, watch)
            if token_ids is None:
                counts["walks: not at an end after 150 tokens"] += 1
                continue
            text = tokenizer.decode(token_ids)
            right = is_valid(draft, schema, text)
            counts["walks: valid" if right else "walks: NOT valid"] += 1
            if not right:
                wrong.append({"draft": draft, "name": name, "text": text[:200]})
                tqdm.write(f"Not valid: {draft}, {name}: {json.dumps(schema, ensure_ascii=False)}: {text}", file=sys.stderr)
        for test in group["tests"]:
            taken = takes(compiler, wanted, tokenizer.encode(json.dumps(test["data"], ensure_ascii=False)))
            counts[f"instances: {'valid' if test['valid'] else 'not valid'}, {'taken' if taken else 'refused'}"] += 1
    table = format_table(("", "count"), sorted(counts.items()))
    masks = statistics.quantiles(watch.times, n=100)
    table += (
        f"\n\nCompilation: median {statistics.median(compilations):.2f} ms, longest {max(compilations):.1f} ms. "
        f"A mask: median {masks[49]:.0f} us, p99 {masks[98]:.0f} us, longest {max(watch.times):.0f} us."
    )
    timings = {"compilation_ms": compilations, "mask_us_percentiles": masks, "longest_mask_us": max(watch.times)}
    details = {"engine": arguments.engine, "counts": counts, "refusals": refusals, "wrong": wrong, "timings": timings}
    report(f"JSON-Schema-Test-Suite with {arguments.engine}", table, details, file=arguments.json)
    unknown = [item for item in wrong if (item["draft"], item["name"]) not in KNOWN]
    return 1 if unknown and arguments.engine == "llguidance" else 0


if __name__ == "__main__":
    raise SystemExit(main())
