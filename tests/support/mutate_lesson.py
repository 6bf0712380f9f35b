"""Small mistakes, made one at a time in the answers of a lesson's solution: do the checks catch them?

    python tests/support/mutate_lesson.py 07            all of them
    python tests/support/mutate_lesson.py 07 --every 9  each ninth, for a quick look

Each mutant runs in a process of its own with a time limit. What survives is printed as a difference of lines; mutants that are no mistakes,
because nobody could tell them from the answer, are listed in `EQUIVALENT` with the reason, and left out of the share.
"""

from __future__ import annotations

import argparse
import ast
import copy
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from lesson_cells import Cell, in_language, read_cells, run_cells

LIMIT = 20.0
"""Seconds for a mutant at the most: one that takes longer is caught, as a check that never ends would be."""
WANTED = 0.9
COMPARISONS = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}

_FALSY = "None is as false as False"
_ONE = "the list has one element"
_NO_TEXT = "bytes that no text has may wait or not"
_SUM = "the two are added"
_ONES = "torch.ones(end - start, end - start, dtype=torch.bool, device=q.device)"
_ATTENTION = "platform.make_attention(shape.{}, shape.{}, shape.head_dim)"
_ANY_ORDER = "the order of the two does not matter"
_ONE_AXIS = "a block of one dimension has one axis"
_SENT, _TOLD = "self.client_count * self.in_flight[replica]", "load.waiting + load.running"
_GIVEN = "given: whether Numba checks indices"
_NUMBERS = "any numbers will do that differ from message to message"
_SAME_SHAPE = "keys and values have the same shape"
EQUIVALENT: dict[str, dict[str, str]] = {
    "01": {
        "characters: 247 → 246": _NO_TEXT,
        "characters: first >= 192 → first > 192": _NO_TEXT,
        "characters: 192 → 193": _NO_TEXT,
        "characters: 192 → 191": "a byte that follows was looked at before",
        "characters: 191 → 192": _NO_TEXT,
        "characters: first <= 247 → first < 247": _NO_TEXT,
        "characters: min(3, len(data)) → min(len(data), 3)": "the order does not matter",
        "characters: 3 → 4": "never more than three bytes wait",
        "characters: 4 → 5": "more than three are never there",
        "penalties: values > 0 → values >= 0": "0 divided is 0 multiplied",
        "top-p: removed[:, 0] = False → pass": "nothing comes before the first, and 0 is less than any top_p",
        "sampler: logits = logits.float() → pass": "given: the model's logits are float32 here",
        "characters: 1 → 0": "what announces one byte, or none, does not wait",
        "stops: self.held = '' → pass": "nobody asks after a stop string was found",
        "stops: 1 → 0": "holding back nothing changes nothing",
        "stops: min(end, len(text) - size) → min(len(text) - size, end)": "the order does not matter",
    },
    "02": {
        "rotary: False → True": "given: whether a buffer is saved with the model",
        f"attend: {_ONES} → {_ONES}": "the two arguments are the same",
        "layer: self.post_attention_layernorm.add_and_norm(x, residual) → self.post_attention_layernorm.add_and_norm(residual, x)": _SUM,
        "model: self.norm.add_and_norm(x, residual) → self.norm.add_and_norm(residual, x)": _SUM,
        "model: True → False": "given lists are as long as they should be, so that strict finds nothing",
        "mine: True → False": "the engine's lists are as long as they should be, so that strict finds nothing",
        "mine: super().__init__(config, platform) → super().__init__(platform, config)": "given: CausalLM uses neither",
        f"mine: {_ATTENTION.format('num_heads', 'num_kv_heads')} → {_ATTENTION.format('num_kv_heads', 'num_heads')}": (
            "given: the kernels take the numbers of heads from the tensors"
        ),
    },
    "03": {
        "size: max(0, left // (max_len * self.bytes_per_token())) → max(left // (max_len * self.bytes_per_token()), 0)": _ANY_ORDER,
        "writing: zip(step.starts, step.counts) → zip(step.counts, step.starts)": f"{_ANY_ORDER} for their sum; the error's text is free",
        "writing: 0 → 1": _SAME_SHAPE,
        "writing: 0 → -1": _SAME_SHAPE,
        "attending: output.transpose(1, 2) → output.transpose(2, 1)": _ANY_ORDER,
        "attending: cache[step.rows, :num_slots].transpose(1, 2) → cache[step.rows, :num_slots].transpose(2, 1)": _ANY_ORDER,
        "attending: query.transpose(1, 2) → query.transpose(2, 1)": _ANY_ORDER,
        "attending: zip(step.starts, step.counts) → zip(step.counts, step.starts)": f"{_ANY_ORDER} for their sum",
        "generating: 0 → -1": "the logits of a step with one text have one row",
    },
    "05": {
        "reduce: 0 → -1": _ONE_AXIS,
        "norm: 0 → -1": _ONE_AXIS,
        "running: 0 → -1": _ONE_AXIS,
        "running: tl.maximum(maximum, tl.max(x, axis=0)) → tl.maximum(tl.max(x, axis=0), maximum)": _ANY_ORDER,
    },
    "06": {
        "merge: 0 → -1": "the total of parts that are all empty is NaN, which is greater than nothing",
        "write-loops: True → False": _GIVEN,
        "decode-loops: True → False": _GIVEN,
        "prefill-loops: True → False": _GIVEN,
        "decode-loops: max(maximum, score) → max(score, maximum)": _ANY_ORDER,
        "prefill-loops: max(maximum, score) → max(score, maximum)": _ANY_ORDER,
        "pieces: max(maximum, scores.max()) → max(scores.max(), maximum)": _ANY_ORDER,
        "decode-kernel: tl.maximum(maximum, tl.max(scores, axis=1)) → tl.maximum(tl.max(scores, axis=1), maximum)": _ANY_ORDER,
        "prefill-kernel: tl.maximum(maximum, tl.max(scores, axis=1)) → tl.maximum(tl.max(scores, axis=1), maximum)": _ANY_ORDER,
        "merge: total[..., None] > 0 → total[..., None] >= 0": "the total of parts that are all empty is NaN, which is greater than nothing",
        "decode-loops: min(first + part_len, context_lens[seq]) → min(context_lens[seq], first + part_len)": _ANY_ORDER,
        "prefill-kernel: tl.minimum(context_len, context_len - (end - begin) + (tile + 1) * TILE) → tl.minimum(context_len - (end - begin) + (tile + 1) * TILE, context_len)": _ANY_ORDER,
        "backend: max(64, kv_cache[0].shape[1]) → max(kv_cache[0].shape[1], 64)": _ANY_ORDER,
        "backend: 0 → 1": _SAME_SHAPE,
        "backend: 0 → -1": _SAME_SHAPE,
    },
    "07": {
        "floor-2: 0 → -1": f"request.sequences: {_ONE}",
        "floor-3: return False → return None": _FALSY,
        "floor-6: 0 → -1": f"token_ids of a result: {_ONE}",
        "floor-9: return False → return None": _FALSY,
        "floor-9: self.swapped[0].order < seq.order → self.swapped[0].order <= seq.order": "no two sequences have the same order",
        "floor-9: self.waiting[0].order < seq.order → self.waiting[0].order <= seq.order": "no two sequences have the same order",
    },
    "08": {
        "start: count_blocks(device.total_bytes, config.gpu_memory_utilization, device.other_bytes, device.peak_bytes, device.block_bytes) → "
        "count_blocks(config.gpu_memory_utilization, device.total_bytes, device.other_bytes, device.peak_bytes, device.block_bytes)": (
            "the two are multiplied"
        ),
        "runner: tokens = iter(()) → pass": "without a sampled row nobody asks for a token",
        "generate: True → False": "the lists are as long as they should be, so that strict finds nothing",
    },
    "12": {
        "split: min(rank, more) → min(more, rank)": _ANY_ORDER,
        "heads: world_size <= num_kv_heads → world_size < num_kv_heads": "with as many ranks as KV heads, both cases are the same",
        "attention: num_kv_heads * head_dim → num_kv_heads // head_dim": "where the last weight of a stack ends does not matter",
        "embedding: 0 → -1": "the row that is looked up for a token of another rank is replaced by zeros",
        "head: super().__init__() → pass": "given: it has no parts that PyTorch must know",
        "executor: self.number += 1 → self.number -= 1": _NUMBERS,
        "executor: 0 → 1": _NUMBERS,
        "executor: 0 → -1": _NUMBERS,
        "executor: 1 → 2": _NUMBERS,
    },
    "13": {
        "loop: return False → return None": _FALSY,
        "coordinator: max(now, self.last + self.PAUSE) → max(self.last + self.PAUSE, now)": _ANY_ORDER,
        "router: self.open_replicas.discard(replica) → pass": "given",
        "router: if not replicas: → pass": "given",
        "router: raise EngineDeadError('There is no replica of the model that takes requests.') → pass": "given",
        f"router: max({_SENT}, {_TOLD}) → max({_TOLD}, {_SENT})": _ANY_ORDER,
        "router: max(0.0, load.kv_cache_usage - 0.5) → max(load.kv_cache_usage - 0.5, 0.0)": _ANY_ORDER,
        "prefix: max(least + 16, 1.5 * least) → max(1.5 * least, least + 16)": _ANY_ORDER,
        "prefix: max(1, cache_tokens // self.CHUNK) → max(cache_tokens // self.CHUNK, 1)": _ANY_ORDER,
        **{f"{cell}: 20 → {other}": "given" for cell in ("router", "prefix", "sending") for other in (19, 21)},
        "taking: return [] → return None": "nothing is as empty as an empty list",
        "surviving: return [] → return None": "given",
        "surviving: return [] → pass": "given",
    },
    "15": {
        "loads: max(0, math.ceil(percent * len(column) / 100) - 1) → max(math.ceil(percent * len(column) / 100) - 1, 0)": _ANY_ORDER,
        "tail: max(0, math.ceil(percent * len(waits) / 100) - 1) → max(math.ceil(percent * len(waits) / 100) - 1, 0)": _ANY_ORDER,
        "interrupted: time < 1.5 * first(work) → time <= 1.5 * first(work)": "no step takes that long to the bit",
        "spares: sum((math.comb(total, k) * availability ** k * (1 - availability) ** (total - k) for k in up)) >= goal → "
        "sum((math.comb(total, k) * availability ** k * (1 - availability) ** (total - k) for k in up)) > goal": "rounding decides where they are equal",
        "audit: report.ttft < report.wait + report.prompt → report.ttft <= report.wait + report.prompt": "no run has the two equal to the bit",
        "spares: 1 → 2": "more than all cannot be up: there are 0 ways",
        "audit: report.running > report.num_replicas * report.max_num_seqs → report.running >= report.num_replicas * report.max_num_seqs": (
            "on average the seats are never all taken, from the first step to the last"
        ),
    },
}
"""By lesson: the cell and what was changed in it, as `cell: old → new`, and why nobody can tell."""


@dataclass(frozen=True)
class Mutant:
    """One mistake: the cell that has it, and what it is, as `cell: old → new`."""

    cell: Cell
    change: str


def mutants_of(cell: Cell) -> Iterator[Mutant]:
    """All mistakes that are made in an answer cell."""
    tree = ast.parse(cell.source)
    for number, node in enumerate(ast.walk(tree)):
        for variant in range(len(_changes(node))):
            mutated = copy.deepcopy(tree)
            target = next(other for i, other in enumerate(ast.walk(mutated)) if i == number)
            before, after = _apply(target, variant)
            yield Mutant(
                Cell(cell.name, ast.unparse(ast.fix_missing_locations(mutated)), cell.kind), f"{cell.name}: {before} → {after}"
            )


def _changes(node: ast.AST) -> list:
    """The mistakes that can be made at a node, as functions that make them."""
    changes = []
    if isinstance(node, ast.Compare):
        for new in COMPARISONS.get(type(node.ops[0]), ()):
            changes.append(lambda node, new=new: node.ops.__setitem__(0, new()))
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        changes.append(lambda node: setattr(node, "op", OPERATORS[type(node.op)]()))
    if isinstance(node, ast.BoolOp):
        changes.append(lambda node: setattr(node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And()))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        changes += [lambda node, by=by: setattr(node, "value", node.value + by) for by in (1, -1)]
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        changes.append(lambda node: setattr(node, "value", not node.value))
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        changes.append(lambda node: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test)))
    if isinstance(node, ast.Call) and len(node.args) >= 2 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2]):
        changes.append(lambda node: node.args.__setitem__(slice(0, 2), [node.args[1], node.args[0]]))
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        changes.append(lambda node: setattr(node, "value", ast.Constant(None)))
    for name in ("body", "orelse"):
        statements = getattr(node, name, None)
        if isinstance(statements, list) and not isinstance(node, (ast.Module, ast.ClassDef)):
            for i, statement in enumerate(statements):
                if not _says_nothing(statement):
                    changes.append(lambda node, name=name, i=i: getattr(node, name).__setitem__(i, ast.Pass()))
    return changes


def _says_nothing(statement: ast.stmt) -> bool:
    """Whether taking a statement out is no change: a docstring, `pass`, or a definition."""
    is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_docstring or isinstance(statement, (ast.Pass, ast.FunctionDef))


def _apply(node: ast.AST, variant: int) -> tuple[str, str]:
    """Make one of the mistakes; return the first lines that differ, before and after."""
    before = ast.unparse(ast.fix_missing_locations(node)).split("\n")
    _changes(node)[variant](node)
    after = ast.unparse(ast.fix_missing_locations(node)).split("\n")
    first = next((i for i, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), 0)
    return before[first].strip(), after[first].strip() if first < len(after) else "(nothing)"


def is_caught(cells: list[Cell], mutant: Mutant, limit: float = LIMIT) -> bool:
    """Whether a check fails on the mutant, or something breaks, or it does not come to an end."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(cells, mutant), daemon=True)
    process.start()
    process.join(limit)
    if process.is_alive():
        process.kill()
        process.join()
        return True
    return process.exitcode != 0


def _run(cells: list[Cell], mutant: Mutant) -> None:
    """In a process of its own: end with 0 if all checks pass."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for the rest of this process
    torch.set_num_threads(1)  # a forked process has none of its parent's threads, and would wait for them
    number = next(i for i, cell in enumerate(cells) if cell.name == mutant.cell.name)
    before = [cell for cell in cells[:number] if cell.kind != "check"]  # those passed, and know nothing of the mutant
    mutated = in_language(
        [*before, mutant.cell, *cells[number + 1 :]], "triton" if mutant.cell.name.endswith("-kernel") else "numba"
    )
    outcome = run_cells(mutated, stop_at_failure=True)
    os._exit(1 if outcome.failed or outcome.broken else 0)


def find_survivors(number: str, every: int = 1) -> tuple[int, list[Mutant]]:
    """Run the mutants of a lesson. Returns how many there were, those that are equivalent left out, and those that no check caught."""
    cells = read_cells(number)
    run_cells(cells)  # everything is imported before the forks
    begin = time.monotonic()
    clean = run_cells(cells)
    limit = min(LIMIT, 2 + 5 * (time.monotonic() - begin))
    assert not clean.failed and not clean.broken, "the answers themselves must pass"
    known = EQUIVALENT.get(number, {})
    mutants = [mutant for cell in cells if cell.kind == "answer" for mutant in mutants_of(cell)]
    mutants = [mutant for mutant in mutants if mutant.change not in known][::every]
    return len(mutants), [mutant for mutant in mutants if not is_caught(cells, mutant, limit)]


def main() -> None:
    """Print the survivors, and fail if there are too many."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("number", help="of the lesson, two digits")
    parser.add_argument("--every", type=int, default=1, help="run only every Nth mutant (default: %(default)s)")
    arguments = parser.parse_args()
    count, survivors = find_survivors(arguments.number, arguments.every)
    for mutant in survivors:
        print(f"survived in {mutant.change}")
    share = 1 - len(survivors) / max(count, 1)
    print(f"lesson {arguments.number}: {count - len(survivors)} of {count} mutants caught, {share:.1%}")
    for change, reason in EQUIVALENT.get(arguments.number, {}).items():
        print(f"equivalent, left out: {change} ({reason})")
    sys.exit(share < WANTED)


if __name__ == "__main__":
    main()
