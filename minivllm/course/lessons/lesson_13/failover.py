"""The checks of lesson 13 for a client: requests that go to replicas, their tokens, and what happens when a replica is lost."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

from minivllm.course.lessons.fake_replicas import (
    Cluster,
    FewestFirst,
    make_request,
    random_options,
    some,
    token_at,
    undisturbed,
    undisturbed_stream,
)
from minivllm.course.lessons.in_flight import Delta
from minivllm.course.lessons.lesson_08.situations import Letters
from minivllm.course.observations import expect, fail, rounds, seeded
from minivllm.engine.core_messages import AddRequest, EngineCoreOutput, NewTokens, StopSequences
from minivllm.outputs import RequestMetrics
from minivllm.request import EngineCoreRequest

_SEND = "`to_send`: `replace(in_flight.request, number=..., resumption=...)`; the prompt, the seed and the limits stay as they were; without a token there is no resumption, None"
_OLD = "the first line of `take`: outputs of another replica or of an earlier sending come from a process that should be dead"
_TEXT = "`take`: each output once, from the replica that has the request, under the number of its latest sending; the text comes from the continuation's own stream, which outlives the replica"
_LOST = "`lose`: the replica leaves `self.replicas`, the router closes it, its requests wait, and nothing else of them changes; and `to_send`, which takes the output so far along"
_LEFT = "what the replica must hear: StopSequences at a stop string, with the number of the latest sending, and AbortRequests at an abort; and `token_ids` of what has finished, which a Resumption would begin again"
_LOOKS = {
    "messages sent by particular requests": "`retry`: `avoid` has the replicas that may not have the request; if that is all of them, it waits on, and the next one may go all the same",
    "messages sent": "`submit` and `retry`: those that wait, the oldest first, each to the replica that the router chooses; without a replica they wait on",
    "prompts that the router was asked about": "`self.router.route(prompt, avoid)`",
    "different numbers": "`next(self.numbers)`: each sending has a number of its own",
    "requests sent": _SEND,
    "noted (replica, number)": "what `retry` and `to_send` note in `in_flight`",
    "resumption": "the Resumption of `to_send`: the output so far of what goes on, in copies of the lists, which grow; and in_flight.metrics",
    "all else": _SEND,
    "a new number each time": "`next(self.numbers)`, which `in_flight.number` keeps",
    "text": _TEXT,
    "finish reasons told": '`take`: `finish_reason` is given once, with the last text; a stop string ends a continuation too, as "stop"',
    "requests left in the client": "`take`: a request whose continuations have all finished leaves `self.requests`; `retry` at the end of `take` and `abort`, since a place may be free now",
    "in flight by the router's count": "`self.router.finish(replica)`: once for each request that ends",
    "requests left in the replicas": _LEFT,
    "aborted requests that got text afterwards": "`abort`: it leaves `self.requests`, and `take` ignores what is not there",
    "deltas": _OLD,
    "output so far": "`token_ids`: a list for each index that is unfinished, which `take` extends; what has finished leaves it, or a Resumption would begin it again",
    "deaths since the latest token": "`take`: `num_deaths` is 0 again as soon as `output.sequences` brings something, whatever its text",
    "requests sent by then": "`take`: `self.retry()` at its end, also if the request goes on: a place may be free now",
    "stop strings told to replicas": "`take`: only if the replica does not know, since `new.finish_reason` is None; and `StoppedSequence`, whose last field is the stop string that was found, `stream.stop`",
    "metrics kept": "`in_flight.metrics = output.metrics`",
    "deltas (index, text, reason)": '`take`: what goes on ends with "error" if `output.error` is set',
    "messages of aborts": "`abort`: the replica hears it if it has the request, and `retry` sends the next",
    "requests that wait": "the end of `lose`: `self.retry()`, since there is another replica",
    "what `judge` is given, and how much was sent before": "`lose`: `lost` has the requests that were at this replica, not those that waited before; `judge` comes before `retry`",
    "what `lose` returns": "`lose`: it returns the deltas of `judge`",
    "sent when one joins": "`retry`, which `join` and `lose` call: the oldest first",
    "replicas that may have r0": "`may_have`: a suspect, with two deaths or more, only where nothing is; the others not where a suspect is",
    "replicas that it has killed": "`may_have`: from its second death on a request is alone at its replica; and `judge`, which gives up whoever was alone",
    "what its user is told": '`judge`: a Delta with "error" for what goes on, and the request leaves `self.requests`',
}  # fmt: skip


def compare(said: str, what: str, expected: Any, got: Any, look: str | None = None) -> None:
    """As `expect`; where to look is known."""
    expect(said, what, expected, got, look or _LOOKS[what])


def plainly(sent: list[tuple[int, Any]]) -> list[tuple[Any, ...]]:
    """Messages to replicas, as plain data."""
    return [(replica, type(message).__name__, _content(message)) for replica, message in sent]


def _content(message: Any) -> Any:
    if isinstance(message, AddRequest):
        return message.request.request_id
    if not hasattr(message, "request_ids") and not hasattr(message, "sequences"):
        said = f"`self.send` is called.\nExpected messages sent: AddRequest\nGot messages sent: {type(message).__name__}"
        fail(f"{said}\nLook at `retry`: `AddRequest(self.to_send(in_flight))`.")
    return getattr(message, "request_ids", None) or [
        (item.request_id, item.index, item.stop_reason) for item in message.sequences
    ]


def make_client(cls: Any, sent: list[tuple[int, Any]] | None = None) -> Any:
    """A learner's client with a router that is right; what it sends goes into a list."""
    messages = [] if sent is None else sent
    return cls(FewestFirst(), lambda replica, message: messages.append((replica, message)), Letters())


def check_sending(cls: Any) -> None:
    """A request goes where the router says, or waits for a replica; whatever was computed before goes with it."""
    for rng in rounds("sending", 20):
        _check_sent(cls, rng)
    for rng in rounds("resumption", 10):
        _check_resumption(cls, rng)
    for rng in rounds("particular", 4):
        _check_particular(cls, rng)


def _check_sent(cls: Any, rng: random.Random) -> None:
    sent: list[tuple[int, Any]] = []
    client = make_client(cls, sent)
    requests = [make_request(rng, f"r{i}", **random_options(rng)) for i in range(rng.randint(2, 6))]
    early, size = rng.randint(0, len(requests)), rng.randint(1, 3)
    for request in requests[:early]:
        client.submit(request)
    said = f"{some(early, 'request')} came before there was a replica."
    compare(said, "messages sent", [], plainly(sent))
    for replica in range(size):
        client.join(replica)
    for request in requests[early:]:
        client.submit(request)
    said += f" Then {some(size, 'replica')} joined, and {some(len(requests) - early, 'more request')} came."
    compare(said, "messages sent", _expected_messages(requests, early, size), plainly(sent))
    prompts = [item.prompt_token_ids for item in requests]
    compare(said, "prompts that the router was asked about", prompts, client.router.asked)
    numbers = [message.request.number for _, message in sent]
    compare(said, "different numbers", len(requests), len(set(numbers)))
    compare(said, "requests sent", *(_by_field(items) for items in (requests, [message.request for _, message in sent])))
    noted = [(item.replica, item.number) for item in client.requests.values()]
    compare(said, "noted (replica, number)", list(zip([replica for replica, _ in sent], numbers, strict=True)), noted)


def _by_field(requests: list[EngineCoreRequest]) -> dict[str, Any]:
    """All that requests say, but not their numbers."""
    names = [(item, field.name) for item in requests for field in fields(item) if field.name != "number"]
    return {f"{name} of {item.request_id}": getattr(item, name) for item, name in names}


def _expected_messages(requests: list[EngineCoreRequest], early: int, size: int) -> list[tuple[Any, ...]]:
    """Those that wait go to the first replica to join; then each goes where fewest are."""
    busy, places = [early] + [0] * (size - 1), [0] * early
    for _ in requests[early:]:
        places.append(busy.index(min(busy)))
        busy[places[-1]] += 1
    return [(place, "AddRequest", request.request_id) for place, request in zip(places, requests, strict=True)]


def _check_particular(cls: Any, rng: random.Random) -> None:
    """Some may not go everywhere, and one may go nowhere: the others do not wait for it."""
    not_to, sent = rng.randrange(2), []  # type: ignore[var-annotated]
    refused = {"r0": {not_to}, "r1": {0, 1}}
    options = {"may_have": lambda self, item, rank: rank not in refused.get(item.request.request_id, ())}
    client = make_client(type("Particular", (cls,), options), sent)
    for replica in range(2):
        client.join(replica)
    for number in range(3):
        client.submit(make_request(rng, f"r{number}"))
    said = f"Two replicas. `may_have` keeps r0 from replica {not_to} and r1 from both; r0, r1 and r2 come."
    expected = [(1 - not_to, "AddRequest", "r0"), (not_to, "AddRequest", "r2")]
    compare(said, "messages sent by particular requests", expected, plainly(sent))


def _check_resumption(cls: Any, rng: random.Random) -> None:
    client, request = make_client(cls), make_request(rng, "r0", n=3, max_tokens=14)
    client.submit(request)
    item = client.requests["r0"]
    item.unfinished = set(rng.sample(range(3), rng.randint(1, 2)))
    item.token_ids = {index: [rng.randrange(1, 27) for _ in range(rng.randint(1, 9))] for index in item.unfinished}
    item.metrics = RequestMetrics(1.0, first_token_time=2.0)
    said = f"to_send for a request with n=3, of whose continuations {sorted(item.unfinished)} go on, with {item.token_ids}."
    first, second = client.to_send(item), client.to_send(item)
    got = first.resumption and (first.resumption.output_token_ids, first.resumption.metrics)
    compare(said, "resumption", (item.token_ids, item.metrics), got)
    compare(said, "all else", _by_field([request]), _by_field([replace(first, resumption=None)]))
    compare(said, "a new number each time", True, first.number < second.number == item.number)
    before = {index: list(tokens) for index, tokens in item.token_ids.items()}
    first.resumption.output_token_ids[min(item.unfinished)].append(99)
    compare(f"{said} Then 99 is added to a list of the first Resumption.", "resumption", before, item.token_ids)


# -- tokens ----------------------------------------------------------------------------------------------------------


def compare_texts(said: str, cluster: Cluster, requests: list[Any], left_out: Any = (), look: str | None = _LOST) -> None:
    """Each user has read what an undisturbed replica writes, and has heard once that it has ended."""
    for request in requests:
        params = request.sampling_params
        for index, (text, reason) in undisturbed(request).items() if request.request_id not in left_out else ():
            key = request.request_id, index
            who = f"{said}\nContinuation {index} of {request.request_id} (n={params.n}, stop={params.stop}, max_tokens={params.max_tokens})."
            compare(who, "text", text, cluster.texts.get(key, ""), look)
            compare(who, "finish reasons told", [reason], cluster.ends.get(key, []), look)


def expect_nothing_left(said: str, cluster: Cluster) -> None:
    """Nothing is in flight."""
    for replica in cluster.cores:
        cluster.handle(replica)
    compare(said, "requests left in the client", [], sorted(cluster.client.requests))
    in_flight = {replica: cluster.router.in_flight[replica] for replica in cluster.router.open_replicas}
    compare(said, "in flight by the router's count", dict.fromkeys(in_flight, 0), in_flight)
    compare(said, "requests left in the replicas", [], sorted(name for core in cluster.cores.values() for name in core.requests))


def compare_stops(said: str, cluster: Cluster, requests: list[Any]) -> None:
    """The replicas of these requests heard which stop strings were found, if they did not know that it was the end."""
    both = [(item, index) for item in requests for index in range(item.sampling_params.n)]
    streams = {(item.request_id, index): undisturbed_stream(item, index) for item, index in both}
    expected = [(*key, stream.stop) for key, (stream, reason) in streams.items() if not reason]
    stopped = [item for _, message in cluster.sent if isinstance(message, StopSequences) for item in message.sequences]
    got = [(item.request_id, item.index, item.stop_reason) for item in stopped if (item.request_id, item.index) in streams]
    compare(said, "stop strings told to replicas", expected, sorted(got, key=str))


def check_taking(cls: Any) -> None:
    """Each token once: whatever is old, aborted or stopped is left out, and a stop string is told to the replica."""
    for rng in rounds("taking", 20):
        cluster = Cluster(cls, rng, rng.randint(1, 3))
        requests = cluster.submit(5)
        aborted = {request.request_id for request in rng.sample(requests, rng.randint(0, 2))}
        said = f"{some(len(cluster.cores), 'replica')}, {len(requests)} requests. Aborted by their clients after two steps: {', '.join(sorted(aborted)) or 'none'}."
        cluster.run(2)
        texts = dict(cluster.texts)
        for request_id in aborted:
            for replica in cluster.cores:
                cluster.step(replica)
            cluster.client.abort(request_id)
            cluster.client.abort(request_id)
        cluster.run()
        compare_texts(said, cluster, requests, aborted, look=None)
        late = [key for key in texts if key[0] in aborted and cluster.texts[key] != texts[key]]
        compare(said, "aborted requests that got text afterwards", [], late)
        compare_stops(said, cluster, [request for request in requests if request.request_id not in aborted])
        expect_nothing_left(said, cluster)
    for rng in rounds("old", 6):
        _check_old(cls, rng)
    _check_refused(cls)
    _check_acquitted(cls)
    _check_one_by_one(cls)


def _check_one_by_one(cls: Any) -> None:
    """A place that is free again is used at once."""
    options = {"may_have": lambda self, item, rank: all(other.replica != rank for other in self.requests.values())}
    cluster = Cluster(type("OneByOne", (cls,), options), seeded("one by one"), 1)
    cluster.submit(4, n=1, max_tokens=3)
    cluster.client.abort("r1")
    cluster.client.abort("r0")
    said = "A replica that `may_have` only one request at a time, and four of them; r1, which waits, and then r0 are aborted."
    expected = [(0, "AddRequest", "r0"), (0, "AbortRequests", ["r0"]), (0, "AddRequest", "r2")]
    compare(said, "messages of aborts", expected, plainly(cluster.sent))
    cluster.run(20)
    compare(f"{said} Then the replica computes.", "requests left in the client", [], sorted(cluster.client.requests))


def _output(request: Any, number: int, tokens: list[int]) -> EngineCoreOutput:
    return EngineCoreOutput(request.request_id, number, [NewTokens(0, tokens)], False, RequestMetrics(1.0, first_token_time=7.0))


def _check_old(cls: Any, rng: random.Random) -> None:
    cluster = Cluster(cls, rng, 2)
    (request,) = cluster.submit(1, n=1, max_tokens=14, ignore_eos=True)
    item = cluster.client.requests["r0"]
    replica, number = item.replica, item.number
    said = f"r0 is at replica {replica} under number {number}. Replica {1 - replica} sends a token of it, and then replica {replica} sends one under number {number - 1}."
    deltas = [*(cluster.client.take(1 - replica, _output(request, number, [5])) or [])]
    deltas += cluster.client.take(replica, _output(request, number - 1, [6])) or []
    compare(said, "deltas", [], deltas)
    tokens = [token_at(request, 0, [])]
    tokens.append(token_at(request, 0, tokens))
    for token in tokens:
        cluster.client.take(replica, _output(request, number, [token]))
    said += f" Then two right ones come, with {tokens}."
    compare(said, "output so far", {0: tokens}, item.token_ids)
    compare(said, "metrics kept", 7.0, item.metrics.first_token_time)


def _check_refused(cls: Any) -> None:
    cluster = Cluster(cls, seeded("refused"), 1)
    cluster.submit(1, n=3, stop=["e"])
    item = cluster.client.requests["r0"]
    said = 'r0 has n=3 and the stop string "e". Continuation 0 gets "e" with the reason "length", and then another token, which is too late.'
    for reason in ("length", None):
        output = EngineCoreOutput("r0", item.number, [NewTokens(0, [5], finish_reason=reason)], False, RequestMetrics(1.0))
        cluster.client.take(0, output)
    compare(said, "output so far", {}, item.token_ids)
    compare(said, "stop strings told to replicas", [], plainly(cluster.sent[1:]))
    output = EngineCoreOutput("r0", item.number, [], True, RequestMetrics(1.0), error="refused")
    deltas = cluster.client.take(0, output) or []
    said += " Then an output says that r0 has failed: `error` is set, `finished` is true."
    got = sorted((delta.index, delta.text, delta.finish_reason) for delta in deltas)
    compare(said, "deltas (index, text, reason)", [(1, "", "error"), (2, "", "error")], got)
    compare(said, "requests left in the client", [], sorted(cluster.client.requests))
    compare(said, "in flight by the router's count", 0, cluster.router.in_flight[0])


def _check_acquitted(cls: Any) -> None:
    """A token acquits a request, even if its text is held back, and the next request may go where it is."""
    options = {"may_have": lambda self, item, rank: not any(other.num_deaths for other in self.requests.values())}
    cluster = Cluster(type("Careful", (cls,), options), seeded("acquitted"), 1)
    (request,) = cluster.submit(1, n=1, max_tokens=14, ignore_eos=True, stop=["ab"])
    item = cluster.client.requests["r0"]
    item.num_deaths = 1
    cluster.submit(1, n=1)
    said = "`num_deaths` of r0 is 1, and `may_have` lets r1 wait until it is 0. An output of r0 has no `sequences`."
    cluster.client.take(0, EngineCoreOutput("r0", item.number, [], False, RequestMetrics(1.0)))
    compare(said, "deaths since the latest token", 1, item.num_deaths)
    said += ' Then comes its token "a", whose text is held back, since "ab" is a stop string.'
    cluster.client.take(0, _output(request, item.number, Letters().encode("a")))
    compare(said, "deaths since the latest token", 0, item.num_deaths)
    compare(said, "requests sent by then", ["r0", "r1"], [message.request.request_id for _, message in cluster.sent])


# -- losses ----------------------------------------------------------------------------------------------------------


def check_surviving(cls: Any) -> None:
    """When a replica is lost, its requests go on at others where they stopped, and what the lost one still says counts for nothing."""
    for rng in rounds("surviving", 30):
        cluster = Cluster(cls, rng, 2)
        requests = cluster.submit(4)
        num_steps, is_zombie = rng.randint(0, 6), rng.random() < 0.5
        cluster.run(num_steps)
        said = f"Two replicas, four requests. After {some(num_steps, 'step')} replica 0 {'falls silent and is given up, but goes on' if is_zombie else 'dies'}."
        if rng.random() < 0.5:
            cluster.step(0)  # its last outputs are read after the news
        cluster.kill(0, goes_on=is_zombie)
        waiting = sorted(name for name, item in cluster.client.requests.items() if item.replica is None)
        compare(said, "requests that wait", [], waiting)
        if rng.random() < 0.5:
            cluster.start(0)
            said += " Another process takes its place."
        cluster.run()
        compare_texts(said, cluster, requests)
        expect_nothing_left(said, cluster)
    for rng in rounds("waiting", 6):
        _check_waiting(cls, rng)
    _check_judged(cls)


def _check_judged(cls: Any) -> None:
    """Those that a lost replica had are judged before they are sent elsewhere; not those that had none."""
    told: list[Any] = []

    def judge(self: Any, lost: Any) -> list[Delta]:
        told.append((sorted(item.request.request_id for item in lost), len(cluster.sent)))
        return [Delta("r2", 0, "", "error")]

    options = {"judge": judge, "may_have": lambda self, item, rank: item.request.request_id != "r0"}
    cluster = Cluster(type("Judging", (cls,), options), seeded("judged"), 2)
    cluster.submit(5)
    said = "Two replicas. `may_have` keeps r0 from both, so it waits; r1 and r3 are at replica 0, r2 and r4 at replica 1, which dies."
    deltas = cluster.client.lose(1)
    compare(said, "what `judge` is given, and how much was sent before", [(["r2", "r4"], 4)], told)
    compare(said, "what `lose` returns", [Delta("r2", 0, "", "error")], deltas)


def _check_waiting(cls: Any, rng: random.Random) -> None:
    cluster = Cluster(cls, rng, 1)
    requests = cluster.submit(2, max_tokens=14)
    cluster.run(2)
    cluster.kill(0)
    requests += cluster.submit(1)
    before, waiting = len(cluster.sent), list(cluster.client.requests)
    cluster.start(0)
    said = "The only replica dies with r0 and r1; r2 comes; then another one joins."
    compare(said, "sent when one joins", waiting, [message.request.request_id for _, message in cluster.sent[before:]])
    cluster.run()
    compare_texts(said, cluster, requests)
