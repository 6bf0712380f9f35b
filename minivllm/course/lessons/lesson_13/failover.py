"""The checks of lesson 13 for a client: requests that go to replicas, their tokens, and what happens when a replica is lost."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from minivllm.course.lessons.lesson_13.situations import Cluster, FewestFirst, make_request, random_options, token_at, undisturbed
from minivllm.course.lessons.lesson_08.situations import Letters
from minivllm.course.observations import expect, fail, rounds, seeded
from minivllm.engine.core_messages import AddRequest, EngineCoreOutput, NewTokens
from minivllm.outputs import RequestMetrics

_SEND = "`to_send`: `replace(in_flight.request, number=..., resumption=...)`; the prompt, the seed and the limits stay as they were"
_TEXT_LOOK = {
    "text": "`take`: each output once, from the replica that has the request, under the number of its latest sending; the text comes from the continuation's own stream, which outlives the replica",
    "ends": "`take`: `finish_reason` is given once, with the last text; a stop string ends a continuation too, as \"stop\"",
}  # fmt: skip


def plainly(sent: list[tuple[int, Any]]) -> list[tuple[Any, ...]]:
    """Messages to replicas, as plain data."""
    said: list[tuple[Any, ...]] = []
    for replica, message in sent:
        if isinstance(message, AddRequest):
            resumption = message.request.resumption
            output = None if resumption is None else dict(sorted(resumption.output_token_ids.items()))
            said.append((replica, "AddRequest", message.request.request_id, output))
        else:
            said.append((replica, type(message).__name__, getattr(message, "request_ids", None) or [(item.request_id, item.index) for item in message.sequences]))
    return said


def check_sending(cls: Any) -> None:
    """A request goes where the router says, or waits for a replica; whatever was computed before goes with it."""
    for rng in rounds("sending", 20):
        sent: list[tuple[int, Any]] = []
        router = FewestFirst()
        client = cls(router, lambda replica, message, sent=sent: sent.append((replica, message)), Letters())
        requests = [make_request(rng, f"r{i}", **random_options(rng)) for i in range(rng.randint(2, 6))]
        early, size = rng.randint(0, len(requests)), rng.randint(1, 3)
        for request in requests[:early]:
            client.submit(request)
        said = f"{early} requests come before there is a replica."
        expect(said, "messages sent", [], plainly(sent), "`retry`: a request waits if no replica may have it")
        for replica in range(size):
            client.join(replica)
        for request in requests[early:]:
            client.submit(request)
        said += f" Then {size} replicas join, and {len(requests) - early} more requests come."
        expected = [(0, "AddRequest", request.request_id, None) for request in requests[:early]]
        expected += [(place, "AddRequest", request.request_id, None) for request, place in zip(requests[early:], _places(early, size, len(requests)), strict=True)]
        expect(said, "messages sent", expected, plainly(sent), "`submit` and `retry`: those that wait, the oldest first, each to the replica that the router chooses")
        expect(said, "prompts that the router was asked about", [request.prompt_token_ids for request in requests], router.asked, "`self.router.route(prompt, avoid)`")
        numbers = [message.request.number for _, message in sent]
        expect(said, "different numbers", len(requests), len(set(numbers)), "`next(self.numbers)`: each sending has a number of its own")
        for request, (replica, message) in zip(requests, sent, strict=True):
            expect(said, "request sent", replace(request, number=0), replace(message.request, number=0), _SEND)
            in_flight = client.requests[request.request_id]
            expect(said, "noted (replica, number)", (replica, message.request.number), (in_flight.replica, in_flight.number), "what `retry` and `to_send` note in `in_flight`")
    _check_resumption(cls)


def _places(early: int, size: int, count: int) -> list[int]:
    busy = [early] + [0] * (size - 1)
    places = []
    for _ in range(count - early):
        places.append(busy.index(min(busy)))
        busy[places[-1]] += 1
    return places


def _check_resumption(cls: Any) -> None:
    for rng in rounds("resumption", 10):
        client = cls(FewestFirst(), lambda replica, message: None, Letters())
        request = make_request(rng, "r0", n=3, max_tokens=14)
        client.submit(request)
        in_flight = client.requests["r0"]
        in_flight.unfinished = set(rng.sample(range(3), rng.randint(1, 2)))
        in_flight.token_ids = {index: [rng.randrange(1, 27) for _ in range(rng.randint(1, 9))] for index in in_flight.unfinished}
        in_flight.metrics = RequestMetrics(1.0, first_token_time=2.0)
        said = f"to_send for a request with n=3, of whose continuations {sorted(in_flight.unfinished)} go on, with {in_flight.token_ids}."
        first, second = client.to_send(in_flight), client.to_send(in_flight)
        expect(said, "resumption.output_token_ids", in_flight.token_ids, first.resumption and first.resumption.output_token_ids, _SEND)
        expect(said, "resumption.metrics", in_flight.metrics, first.resumption.metrics, "in_flight.metrics: the second argument of Resumption")
        expect(said, "all else", replace(request, number=0), replace(first, number=0, resumption=None), _SEND)
        expect(said, "a new number each time", True, first.number < second.number == in_flight.number, "`next(self.numbers)`, which `in_flight.number` keeps")
        first.resumption.output_token_ids[min(in_flight.unfinished)].append(99)
        expect(said, "lists of its own in the Resumption", False, 99 in in_flight.token_ids[min(in_flight.unfinished)], "what `to_send` puts into the Resumption: copies, `list(tokens)`, because these lists grow")


# -- tokens ----------------------------------------------------------------------------------------------------------


def compare_texts(said: str, cluster: Cluster, requests: list[Any], left_out: Any = ()) -> None:
    """Each user has read what an undisturbed replica writes, and has heard once that it has ended."""
    for request in requests:
        if request.request_id in left_out:
            continue
        params = request.sampling_params
        for index, (text, reason) in undisturbed(request).items():
            key = request.request_id, index
            who = f"{said}\nContinuation {index} of {request.request_id} (n={params.n}, stop={params.stop}, max_tokens={params.max_tokens})."
            expect(who, "text", text, cluster.texts.get(key, ""), _TEXT_LOOK["text"])
            expect(who, "finish reasons told", [reason], cluster.ends.get(key, []), _TEXT_LOOK["ends"])


def expect_nothing_left(said: str, cluster: Cluster) -> None:
    """Nothing is in flight."""
    for replica in cluster.cores:
        cluster.handle(replica)
    expect(said, "requests left in the client", [], sorted(cluster.client.requests), "`take`: a request whose continuations have all finished leaves `self.requests`")
    in_flight = {replica: cluster.router.in_flight[replica] for replica in cluster.router.open_replicas}
    expect(said, "in flight by the router's count", dict.fromkeys(in_flight, 0), in_flight, "`self.router.finish(replica)`: once for each request that ends")
    left = sorted(name for core in cluster.cores.values() for name in core.requests)
    expect(said, "requests left in the replicas", [], left, "what the replica must hear: StopSequences at a stop string, with the number of the latest sending, and AbortRequests at an abort")


def check_taking(cls: Any) -> None:
    """Each token once: whatever is old, aborted or stopped is left out, and a stop string is told to the replica."""
    for rng in rounds("taking", 20):
        cluster = Cluster(cls, rng, rng.randint(1, 3))
        requests = [make_request(rng, f"r{i}", **random_options(rng)) for i in range(5)]
        for request in requests:
            cluster.client.submit(request)
        aborted = rng.sample(requests, rng.randint(0, 2))
        said = f"{len(cluster.cores)} replicas, {len(requests)} requests, of which {len(aborted)} are aborted by their clients after two steps."
        cluster.run(2)
        texts = dict(cluster.texts)
        for request in aborted:
            for replica in cluster.cores:
                cluster.step(replica)
            cluster.client.abort(request.request_id)
            cluster.client.abort(request.request_id)
        for replica in cluster.cores:
            cluster.handle(replica)
        cluster.run()
        names = {request.request_id for request in aborted}
        compare_texts(said, cluster, requests, names)
        late = [key for key in texts if key[0] in names and cluster.texts[key] != texts[key]]
        expect(said, "aborted requests that got text afterwards", [], late, "`abort`: it leaves `self.requests`, and `take` ignores what is not there")
        expect_nothing_left(said, cluster)
    _check_old(cls)
    _check_refused(cls)
    _check_one_by_one(cls)


def _check_one_by_one(cls: Any) -> None:
    """A place that is free again is used at once."""
    alone = type("OneByOne", (cls,), {"may_have": lambda self, item, rank: all(other.replica != rank for other in self.requests.values())})
    cluster = Cluster(alone, seeded("one by one"), 1)
    for number in range(4):
        cluster.client.submit(make_request(seeded(f"one by one {number}"), f"r{number}", n=1, max_tokens=3))
    cluster.client.abort("r1")
    cluster.client.abort("r0")
    said = "A replica that `may_have` only one request at a time, and four of them; r1, which waits, and then r0 are aborted."
    expect(said, "messages", [(0, "AddRequest", "r0", None), (0, "AbortRequests", ["r0"]), (0, "AddRequest", "r2", None)], plainly(cluster.sent), "`abort`: the replica hears it if it has the request, and `retry` sends the next")
    cluster.run(20)
    expect(f"{said} Then the replica computes.", "requests left", [], sorted(cluster.client.requests), "the end of `take`: `self.retry()`, since a place may be free now")


def _output(request: Any, number: int, tokens: list[int], **options: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request.request_id, number, [NewTokens(0, tokens)], False, RequestMetrics(1.0, first_token_time=7.0), **options)


def _check_old(cls: Any) -> None:
    for rng in rounds("old", 6):
        cluster = Cluster(cls, rng, 2)
        request = make_request(rng, "r0", n=1, max_tokens=14)
        request = replace(request, eos_token_ids=())
        cluster.client.submit(request)
        in_flight = cluster.client.requests["r0"]
        replica, number = in_flight.replica, in_flight.number
        said = f"r0 is at replica {replica} under number {number}. Replica {1 - replica} sends a token of it, and then replica {replica} sends one under number {number - 1}."
        deltas = cluster.client.take(1 - replica, _output(request, number, [5])) or []
        deltas = [*deltas, *(cluster.client.take(replica, _output(request, number - 1, [6])) or [])]
        expect(said, "deltas", [], deltas, "the first line of `take`: outputs of another replica or of an earlier sending come from a process that should be dead")
        tokens = [token_at(request, 0, [])]
        deltas = cluster.client.take(replica, _output(request, number, tokens))
        more = [*tokens, token_at(request, 0, tokens)]
        deltas = [*deltas, *cluster.client.take(replica, _output(request, number, more[1:]))]
        expect(f"{said} Then two right ones come, with {more}.", "output so far", {0: more}, in_flight.token_ids, "`token_ids`: a list for each index, which `take` extends")
        expect(said, "metrics kept", 7.0, in_flight.metrics.first_token_time, "`in_flight.metrics = output.metrics`")
        expect(said, "deltas", 2, len(deltas), "what `take` returns: a Delta for each of `output.sequences`")


def _check_refused(cls: Any) -> None:
    cluster = Cluster(cls, seeded("refused"), 1)
    request = make_request(seeded("refused request"), "r0", n=2)
    cluster.client.submit(request)
    number = cluster.client.requests["r0"].number
    output = EngineCoreOutput("r0", number, [], True, RequestMetrics(1.0), error="the core has refused it")
    deltas = cluster.client.take(0, output) or []
    said = "An output says that r0, with n=2, has failed: `error` is set, `finished` is true."
    got = sorted((delta.index, delta.text, delta.finish_reason) for delta in deltas)
    expect(said, "deltas (index, text, reason)", [(0, "", "error"), (1, "", "error")], got, "`take`: what goes on ends with \"error\" if `output.error` is set")
    expect(said, "requests left in the client", [], sorted(cluster.client.requests), "`take`: what has failed leaves `self.requests`")
    expect(said, "in flight by the router's count", 0, cluster.router.in_flight[0], "`self.router.finish(replica)`")


# -- losses ----------------------------------------------------------------------------------------------------------


def check_surviving(cls: Any) -> None:
    """When a replica is lost, its requests go on at others where they stopped, and what the lost one still says counts for nothing."""
    for rng in rounds("surviving", 30):
        cluster = Cluster(cls, rng, 2)
        requests = [make_request(rng, f"r{i}", **random_options(rng)) for i in range(4)]
        for request in requests:
            cluster.client.submit(request)
        num_steps, is_zombie = rng.randint(0, 6), rng.random() < 0.5
        cluster.run(num_steps)
        said = f"Two replicas, four requests. After {num_steps} steps replica 0 {'falls silent and is given up, but goes on' if is_zombie else 'dies'}."
        if is_zombie:
            zombie, inbox = cluster.cores.pop(0), cluster.inbox.pop(0)
            cluster.told(cluster.client.lose(0))
            inbox.clear()
            wire = next(wire for rank, wire in cluster.outbox if rank == 0)
            for _ in range(3):
                wire.extend(zombie.step().outputs)
        else:
            if rng.random() < 0.5:
                cluster.step(0)  # its last outputs are read after the news
            cluster.kill(0)
        waiting = sorted(name for name, item in cluster.client.requests.items() if item.replica is None)
        expect(said, "requests that wait", [], waiting, "the end of `lose`: `self.retry()`, since replica 1 is there")
        if rng.random() < 0.5:
            cluster.start(0)
            said += " Another process takes its place."
        cluster.run()
        compare_texts(said, cluster, requests)
        expect_nothing_left(said, cluster)
    _check_waiting(cls)


def _check_waiting(cls: Any) -> None:
    for rng in rounds("waiting", 6):
        cluster = Cluster(cls, rng, 1)
        requests = [make_request(rng, f"r{i}", max_tokens=14) for i in range(3)]
        for request in requests[:2]:
            cluster.client.submit(request)
        cluster.run(2)
        cluster.kill(0)
        cluster.client.submit(requests[2])
        said = "The only replica dies with r0 and r1; r2 comes; then another one joins."
        before = len(cluster.sent)
        cluster.start(0)
        waiting = [name for name in ("r0", "r1", "r2") if name in cluster.client.requests]
        got = [message.request.request_id for _, message in cluster.sent[before:]]
        expect(said, "sent then", waiting, got, "`retry`, which `join` and `lose` call: the oldest first")
        cluster.run()
        compare_texts(said, cluster, requests)


def _check_company(cls: Any) -> None:
    for rng in rounds("company", 20):
        cluster = Cluster(cls, rng, 3)
        for number in range(4):
            cluster.client.submit(make_request(rng, f"r{number}"))
        for item in cluster.client.requests.values():
            item.num_deaths, item.replica = rng.choice((0, 0, 1, 1, 2, 3)), rng.choice((0, 0, 1))
        wanted = cluster.client.requests["r0"]
        wanted.replica = None
        deaths = {rank: [item.num_deaths for item in cluster.client.requests.values() if item.replica == rank] for rank in range(3)}
        said = f"r0 has seen {wanted.num_deaths} replicas die, and those that are at each replica so many: {deaths}."
        expected = [rank for rank in range(3) if not deaths[rank] or (wanted.num_deaths < 2 and max(deaths[rank]) < 2)]
        got = [rank for rank in range(3) if cluster.client.may_have(wanted, rank)]
        expect(said, "replicas that may have r0", expected, got, "`may_have`: a suspect, with two deaths or more, only where nothing is; the others not where a suspect is")


def check_poison(cls: Any) -> None:
    """A request that kills is given up after three replicas, and no other is."""
    _check_company(cls)
    for rng in rounds("poison", 12):
        cluster = Cluster(cls, rng, 3)
        requests = [make_request(rng, f"r{i}", max_tokens=rng.randint(4, 14), n=1) for i in range(6)]
        poison, position = rng.choice(requests).request_id, rng.randint(0, 3)
        said = f"Three replicas, six requests. {poison} kills whichever replica computes its token {position}; another process always takes its place."
        for request in requests:
            cluster.client.submit(request)
        deaths = _run_with_poison(cluster, poison, position, said)
        ends = cluster.ends.get((poison, 0), [])
        is_short = len(undisturbed(next(item for item in requests if item.request_id == poison))[0][0]) < position
        if ends == ["error"]:
            expect(said, "replicas that it has killed", 3, deaths, "`may_have`: from its second death on a request is alone at its replica, and `judge` gives up whoever was alone")
        elif not is_short and deaths:
            expect(f"{said} It has killed {deaths}.", f"finish reasons told for {poison}", ["error"], ends, "`judge`: a Delta with \"error\" for what goes on, and the request leaves `self.requests`")
        compare_texts(said, cluster, requests, {poison})
        expect_nothing_left(said, cluster)
    _check_acquittal(cls)


def _run_with_poison(cluster: Cluster, poison: str, position: int, said: str) -> int:
    """Run until all is done. Returns how many replicas have died."""
    deaths = 0
    for _ in range(200):
        for replica in list(cluster.cores):
            cluster.handle(replica)
            core = cluster.cores[replica]
            if any(len(tokens) >= position for tokens in core.requests.get(poison, (None, {}))[1].values()):
                deaths += 1
                cluster.kill(replica)
                cluster.start(replica)
                if deaths > 6:
                    fail(f"{said}\nExpected: it is given up after 3 replicas\nGot: it has killed {deaths}, and goes on.\nLook at `judge`: who was alone when its replica died is to blame.")
            else:
                cluster.step(replica)
        cluster.deliver()
        if not cluster.client.requests:
            break
    return deaths


def _check_acquittal(cls: Any) -> None:
    rng = random.Random(5)
    cluster = Cluster(cls, rng, 1)
    request = replace(make_request(seeded("acquittal"), "r0", n=1, max_tokens=14), eos_token_ids=())
    cluster.client.submit(request)
    for _ in range(5):
        cluster.run(1)
        cluster.kill(0)
        cluster.start(0)
    cluster.run()
    said = "A replica dies five times with r0, which has got a token each time: somebody else is to blame."
    compare_texts(said, cluster, [request])


def check_storm(cls: Any) -> None:
    """Random deaths, silences, aborts and newcomers: each user reads what an undisturbed replica writes."""
    for rng in rounds("storm", 30):
        cluster = Cluster(cls, rng, 3)
        requests = [replace(make_request(rng, f"r{i}", **random_options(rng)), arrival_time=float(i)) for i in range(10)]
        todo, said = list(requests), "Three replicas, ten requests; replicas die and others take their places, and messages come late."
        while todo or cluster.client.requests:
            action = rng.choice(("submit", "step", "step", "step", "deliver", "deliver", "kill"))
            if action == "submit" and todo:
                cluster.client.submit(todo.pop(0))
            elif action == "kill" and rng.random() < 0.3:
                cluster.deliver(rng.randint(0, 9))
                if all(item.num_deaths < 1 for item in cluster.client.requests.values()):  # kills that come from outside blame nobody
                    replica = rng.choice(sorted(cluster.cores))
                    cluster.kill(replica)
                    cluster.start(replica)
            elif action == "deliver":
                cluster.deliver(rng.randint(1, 6))
            else:
                cluster.step(rng.choice(sorted(cluster.cores)))
            if len(cluster.sent) > 2000:
                fail(f"{said}\nExpected: they end\nGot: {len(cluster.sent)} messages to replicas, and no end.\nLook at `retry`: only what is at no replica is sent.")
        compare_texts(said, cluster, requests)
        cluster.run(3)
        expect_nothing_left(said, cluster)
