"""The JSON-Schema-Test-Suite as structured outputs: which of its schemas compile, and whether what they let through validates.

    pip download --no-deps --no-binary jsonschema jsonschema==4.26.0 && tar xzf jsonschema-4.26.0.tar.gz
    python benchmarks/json_schema_suite.py jsonschema-4.26.0/json/tests/draft{7,2019-09,2020-12} --json suite.json

The suite comes with the source of jsonschema (MIT licence). Each schema gets random walks: any token that the mask allows, and the end of the
text, where it is allowed, with every third token. What reaches its end must validate. And for each instance of the suite, the grammar should take
its JSON exactly if it is valid. It is stricter than the schema where JSON leaves a choice: the order of properties, spaces, duplicates.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
from tqdm import tqdm

from minivllm.bench.report import format_table, report
from minivllm.core.structured_output import GrammarCompiler
from minivllm.engine.tokenizer import Tokenizer
from minivllm.errors import RequestError
from minivllm.models.hub import resolve_model
from minivllm.sampling_params import StructuredOutputsParams
from minivllm.worker.sampler import allowed_tokens

EOS, VOCAB_SIZE = 2, 49152
NUM_WALKS, WALK_TOKENS = 3, 150


def walk(compiler: GrammarCompiler, wanted: StructuredOutputsParams, rng: random.Random) -> list[int] | None:
    """Random tokens of a grammar; None if they do not end in time."""
    grammar, token_ids = compiler.compile(wanted, (EOS,)), []
    while len(token_ids) < WALK_TOKENS:
        [mask] = grammar.masks()
        allowed = allowed_tokens(mask, VOCAB_SIZE)
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
    """Whether a text is JSON of a schema."""
    try:
        VALIDATORS[draft](schema, format_checker=jsonschema.FormatChecker()).validate(json.loads(text))
    except (jsonschema.ValidationError, ValueError):
        return False
    return True


def takes(compiler: GrammarCompiler, wanted: StructuredOutputsParams, token_ids: list[int]) -> bool:
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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    arguments = parser.parse_args()

    model = resolve_model("smollm2-135m")
    tokenizer, compiler, rng = Tokenizer(model), GrammarCompiler(model, VOCAB_SIZE), random.Random(0)
    groups = [
        (folder.name, group)
        for folder in arguments.folders
        for file in sorted(folder.glob("*.json"))
        for group in json.loads(file.read_text())
    ]
    counts: Counter[str] = Counter()
    wrong, refusals, longest = [], Counter[str](), 0.0
    for draft, group in tqdm(groups, dynamic_ncols=True):
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
        longest = max(longest, time.perf_counter() - begin)
        counts["compiled"] += 1
        for _ in range(NUM_WALKS):
            token_ids = walk(compiler, wanted, rng)
            if token_ids is None:
                counts["walks: not at an end after 150 tokens"] += 1
                continue
            text = tokenizer.decode(token_ids)
            right = is_valid(draft, schema, text)
            counts["walks: valid" if right else "walks: NOT valid"] += 1
            if not right:
                wrong.append({"draft": draft, "schema": schema, "text": text})
        for test in group["tests"]:
            taken = takes(compiler, wanted, tokenizer.encode(json.dumps(test["data"], ensure_ascii=False)))
            counts[f"instances: {'valid' if test['valid'] else 'not valid'}, {'taken' if taken else 'refused'}"] += 1
    table = format_table(("", "count"), sorted(counts.items()))
    table += f"\n\nThe longest compilation took {longest * 1000:.1f} ms."
    details = {"counts": counts, "refusals": refusals, "wrong": wrong}
    report("JSON-Schema-Test-Suite", table, details, file=arguments.json)
    for item in wrong[:20]:
        print(json.dumps(item, ensure_ascii=False))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
