"""Two recorded runs side by side: their numbers, the first step at which they part, and their requests as bars in one page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from typing import Any

from minivllm.bench.report import format_table
from minivllm.bench.summary import Goals
from minivllm.bench.trace_summary import summarize_trace, time_origin
from minivllm.engine.trace import EngineTrace, StepRecord

GOALS = Goals(ttft=300, tpot=100)
"""Of the goodput."""
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#B8A900")
"""Those of the figures and of the live page."""
WIDTH, LEFT, TITLE, AXIS = 900, 44, 22, 26
MOST_NAMED, MOST_ROWS = 12, 24
Plan = tuple[tuple[str, str, int], ...]
"""What a step does, as (action, sequence, tokens)."""


@dataclass(frozen=True)
class TraceDiff:
    """What two runs have in common, and where they differ.

    Attributes:
        names, traces: Of the runs.
        rows: A quantity, and its value in each run, in words.
        step: The first step with another plan; None if there is none.
        plans: What each run does in that step; nothing if it has ended.
    """

    names: tuple[str, str]
    traces: tuple[EngineTrace, EngineTrace]
    rows: list[tuple[str, str, str]]
    step: int | None
    plans: tuple[Plan, Plan]

    @property
    def part(self) -> str:
        """Where the runs part, in a sentence."""
        return "Both runs have the same steps." if self.step is None else f"The first step that differs is step {self.step}."

    def __str__(self) -> str:
        text = f"{format_table(('', *self.names), self.rows)}\n\n{self.part}"
        if self.step is None:
            return text
        return text + "".join(f" {name}: {describe(plan)}." for name, plan in zip(self.names, self.plans, strict=True))


def diff_traces(names: tuple[str, str], traces: tuple[EngineTrace, EngineTrace]) -> TraceDiff:
    """Compare two runs. They should be of the same requests; if not, a row says so."""
    runs = [summarize_trace(trace, GOALS) for trace in traces]
    rows = [(name, *(_in_words(get(run), form) for run in runs)) for name, get, form in _QUANTITIES]
    rows.append(("preemptions", *(str(sum(len(step.preempted) for step in trace)) for trace in traces)))
    rows.append(("steps", *(str(len(trace)) for trace in traces)))
    if _requests(traces[0]) != _requests(traces[1]):
        rows.append(("requests", *(f"{len(trace.requests)}, not the same ones" for trace in traces)))
    plans = enumerate(zip_longest(*(map(plan, trace) for trace in traces), fillvalue=()))
    step, differing = next(((number, pair) for number, pair in plans if pair[0] != pair[1]), (None, ((), ())))
    return TraceDiff(names, traces, rows, step, differing)


def _requests(trace: EngineTrace) -> list[tuple[Any, ...]]:
    """What each request asked for, and, where the clock is a virtual one, when."""
    origin = time_origin(trace) if trace.config.model == "simulated" else None
    return [
        (
            request.prompt_token_ids,
            request.max_num_tokens,
            request.params,
            None if origin is None else round(request.arrival_time - origin, 6),
        )
        for request in trace.requests.values()
    ]


_QUANTITIES = (
    ("output tokens/s", lambda run: run.output_tokens_per_second, ".0f"),
    ("requests/s", lambda run: run.requests_per_second, ".2f"),
    (f"goodput, requests/s ({GOALS.describe()})", lambda run: run.goodput, ".2f"),
    ("TTFT p50", lambda run: run.ttft.p50, "s"),
    ("TTFT p99", lambda run: run.ttft.p99, "s"),
    ("ITL p50", lambda run: run.itl.p50, "s"),
    ("ITL p99", lambda run: run.itl.p99, "s"),
    ("latency p99", lambda run: run.latency.p99, "s"),
)


def _in_words(value: float | None, form: str) -> str:
    if value is None or value != value:
        return "–"
    return f"{1000 * value:.0f} ms" if form == "s" else f"{value:{form}}"


def plan(step: StepRecord) -> Plan:
    """What a step does, as (action, sequence, tokens), the preempted first."""
    preempted = [
        ("preempt" if item.mode == "recompute" else "swap out", _name(item.request_id, item.index), 0) for item in step.preempted
    ]
    return (*preempted, *((item.action, _name(item.request_id, item.index), item.num_tokens) for item in step.scheduled))


def _name(request_id: str, index: int) -> str:
    return f"#{request_id}/{index}" if index else f"#{request_id}"


def describe(plan: Plan) -> str:
    """A plan in words."""
    parts = []
    for action in dict.fromkeys(action for action, *_ in plan):
        of_action = [(name, tokens) for other, name, tokens in plan if other == action]
        names = [name if action != "prefill" else f"{name} ({tokens} tokens)" for name, tokens in of_action[:MOST_NAMED]]
        more = f" and {len(of_action) - MOST_NAMED} more" if len(of_action) > MOST_NAMED else ""
        parts.append(f"{action} {', '.join(names)}{more}")
    return "; ".join(parts) or "it has ended"


# -- the page --------------------------------------------------------------------------------------------------------


def to_html(diff: TraceDiff) -> str:
    """The tables and the bars, to be put into a page."""
    step = "" if diff.step is None else _step_to_html(diff)
    numbers = _table(diff.names, [(escape(name), escape(a), escape(b)) for name, a, b in diff.rows])
    return f"{numbers}<p>{diff.part}</p>{step}{to_svg(diff)}"


def _table(names: tuple[str, str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of HTML: a head, and a value in each run."""
    cells = "".join(f"<tr><th scope='row'>{head}</th><td>{a}</td><td>{b}</td></tr>" for head, a, b in rows)
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in names)
    return f"<table class='diff'><thead><tr><td></td>{head}</tr></thead><tbody>{cells}</tbody></table>"


def _step_to_html(diff: TraceDiff) -> str:
    """The step that differs: a row for each sequence with which the runs do not do the same, and in words what both do."""
    parts: list[dict[str, str]] = [{}, {}]
    for part, plan in zip(parts, diff.plans, strict=True):
        for action, name, tokens in plan:  # two, perhaps, of one sequence: preempted and admitted again
            what = _describe_part(action, tokens)
            part[name] = f"{part[name]}; {what}" if name in part else what
    numbers = {_name(request_id, 0): i for i, request_id in enumerate({**diff.traces[1].requests, **diff.traces[0].requests})}
    numbers |= {name: numbers[name.rpartition("/")[0]] for name in parts[0] | parts[1] if name not in numbers}
    differ = sorted((name for name in parts[0] | parts[1] if parts[0].get(name) != parts[1].get(name)), key=numbers.__getitem__)
    rows = [
        (
            f"<i style='background:{COLORS[numbers[name] % len(COLORS)]}'></i>{escape(name)}",
            *(part.get(name, "–" if part else "it has ended") for part in parts),
        )
        for name in differ[:MOST_ROWS]
    ]
    more = f"<p>And {len(differ) - MOST_ROWS} more.</p>" if len(differ) > MOST_ROWS else ""
    same = tuple(part for part in diff.plans[0] if part[1] not in differ)
    both = f"<p>Both{'' if differ else ', in another order'}: {escape(describe(same))}.</p>" if same else ""
    return f"{_table(diff.names, rows) if rows else ''}{more}{both}"


def _describe_part(action: str, tokens: int) -> str:
    done = {"preempt": "preempted", "swap out": "swapped out"}
    return done.get(action) or (action if tokens == 1 else f"{action}, {tokens} tokens")


def to_page(diff: TraceDiff, title: str = "Two runs") -> str:
    """A page of its own, which needs no other file."""
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:light-dark(#333,#e4e6e8)}"
        "table.diff{border-collapse:collapse}.diff th,.diff td{padding:2px 14px 2px 0;text-align:left}.diff td{font-variant-numeric:tabular-nums}"
        "i{display:inline-block;width:12px;height:12px;margin-right:6px}th:has(i){white-space:nowrap}svg{max-width:100%;height:auto;margin-top:1rem}"
    )
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width'><meta name='color-scheme' content='light dark'>"
        f"<title>{escape(title)}</title><style>{style}</style>"
    )
    return f"<!doctype html><html lang='en'><head>{head}</head><body><h1>{escape(title)}</h1>{to_html(diff)}</body></html>\n"


def to_svg(diff: TraceDiff) -> str:
    """A row for each request, one run above the other: grey while it waits, pale until its first token, then its colour."""
    end = max((trace[-1].end - time_origin(trace) for trace in diff.traces if len(trace)), default=1.0) or 1.0
    row = max(2.0, min(9.0, 260 / max(1, *(len(trace.requests) for trace in diff.traces))))
    height, parts = 0.0, []
    for name, trace in zip(diff.names, diff.traces, strict=True):
        parts.append(f"<text x='{LEFT}' y='{height + 15:.0f}' font-weight='600'>{escape(name)}</text>")
        top = height + TITLE
        for i, (kind, start, stop, color) in _bars(trace):
            x, width = _place(start, end), max(0.5, _place(stop, end) - _place(start, end))
            opacity = {"waits": 0.35, "prefill": 0.35, "decode": 1}[kind]
            parts.append(
                f"<rect x='{x:.1f}' y='{top + i * row:.1f}' width='{width:.1f}' height='{row * (0.3 if kind == 'waits' else 0.8):.1f}' fill='{color}' opacity='{opacity}'/>"
            )
        height = top + len(trace.requests) * row + 8
        if diff.step is not None and diff.step < len(trace):
            x = _place(trace[diff.step].start - time_origin(trace), end)
            parts.append(f"<path d='M{x:.1f} {top - 4:.0f}V{height:.0f}' stroke='currentColor' stroke-dasharray='4 3'/>")
    for i in range(6):
        parts.append(
            f"<text x='{_place(i * end / 5, end):.0f}' y='{height + 16:.0f}' text-anchor='middle'>{i * end / 5:.1f} s</text>"
        )
    label = f"Requests of {diff.names[0]} and of {diff.names[1]} over time"
    return (
        f"<svg role='img' aria-label='{escape(label, quote=True)}' viewBox='0 0 {WIDTH} {height + AXIS:.0f}' width='{WIDTH}' "
        f"font-family='system-ui,sans-serif' font-size='12' fill='currentColor' xmlns='http://www.w3.org/2000/svg'>{''.join(parts)}</svg>"
    )


def _place(seconds: float, end: float) -> float:
    return LEFT + (WIDTH - LEFT - 30) * seconds / end


def _bars(trace: EngineTrace) -> Iterator[tuple[int, tuple[str, float, float, str]]]:
    """Of each request's row: kind, start and end in seconds since the first arrival, and colour."""
    origin = time_origin(trace)
    last = trace[-1].end if len(trace) else origin
    for i, request in enumerate(trace.requests.values()):
        color = COLORS[i % len(COLORS)]
        scheduled, first = request.first_scheduled_time, request.first_token_time
        finished = last if request.finished_time is None else request.finished_time
        moments = [
            ("waits", request.arrival_time, scheduled, "#7F7F7F"),
            ("prefill", scheduled, first, color),
            ("decode", first, finished, color),
        ]
        for kind, start, stop, fill in moments:
            if start is not None:
                yield i, (kind, start - origin, (finished if stop is None else stop) - origin, fill)
