"""Many replicas on a virtual clock."""

from __future__ import annotations

import math
import random

import pytest

from minivllm.bench.production import HashedRequest, load_trace, stream_trace
from minivllm.bench.summary import Distribution, Goals, LatencyHistogram
from minivllm.bench.workloads import WorkloadRequest, generate_requests
from minivllm.data_parallel.routing import ROUTERS, LeastLoadedRouter, LoadPublisher
from minivllm.entrypoints.cli.main import main
from minivllm.errors import ConfigError
from minivllm.executor.simulated import VirtualClock
from minivllm.simulation.engine import format_replicas, make_simulated_engine, simulate, simulate_replicas
from minivllm.simulation.events import SimulatedReplica

ENGINE = {"max_num_seqs": 4, "num_gpu_blocks": 64, "max_model_len": 512}


def workload(num_requests=120, rate=6.0, **options):
    return list(generate_requests(num_requests, arrival_rate=rate, max_len=512, **options))


def test_one_replica_is_the_engine_that_is_simulated_without_a_router():
    one, alone = simulate_replicas(workload(), 1, **ENGINE), simulate(workload(), trace=False, **ENGINE)
    assert one.completed == alone.completed == 120
    assert one.seconds == pytest.approx(alone.seconds)
    assert one.output_tokens == alone.output_tokens
    for ours, exact in ((one.ttft, alone.ttft), (one.latency, alone.latency), (one.tpot, alone.tpot)):
        assert ours.mean == pytest.approx(exact.mean)
        assert ours[1:] == pytest.approx(exact[1:], rel=0.011)


@pytest.mark.parametrize("routing", list(ROUTERS))
def test_every_request_is_served_once_whatever_the_router(routing):
    run = simulate_replicas(workload(rate=20.0), 5, routing=routing, goals=Goals(ttft=1000), **ENGINE)
    assert run.completed == run.num_requests == sum(run.requests) == 120
    assert all(run.requests)
    assert run.output_tokens == sum(request.output_len for request in workload(rate=20.0))
    assert 0 < run.goodput <= run.requests_per_second
    assert run.imbalance >= 1
    assert all(0 < busy <= 1 for busy in run.busy)
    assert sum(run.mean_in_flight) * run.seconds == pytest.approx(run.latency.mean * 120)
    again = simulate_replicas(workload(rate=20.0), 5, routing=routing, goals=Goals(ttft=1000), **ENGINE)
    assert again == run


class LooksAtEach(LeastLoadedRouter):
    """The least loaded replica, found in the plain way."""

    def choose(self, prompt_token_ids, cache_salt):
        order = [*range(self._start, len(self._scores)), *range(self._start)]
        self._start = (self._start + 1) % len(self._scores)
        return min(order, key=self._scores.__getitem__)  # the first of several


def simulate_plainly(requests, num_replicas):
    """A simulation without a heap, a histogram, or anything else that is there for speed. Returns each replica's number of requests, and the TTFTs,
    ITLs and latencies in the order in which they are known."""
    replicas = [SimulatedReplica(make_simulated_engine(clock=VirtualClock(), trace=False, **ENGINE)) for _ in range(num_replicas)]
    router, coordinator = LooksAtEach(), LoadPublisher(requests[0].arrival_time)
    for index, replica in enumerate(replicas):
        replica.clock.advance_to(requests[0].arrival_time)
        router.open(index, replica.cache_tokens)
    waiting, ends, came, counts = list(enumerate(requests)), {}, {}, [0] * num_replicas
    ttfts, itls, latencies = [], [], []
    while waiting or ends:
        arrival = waiting[0][1].arrival_time if waiting else math.inf
        end, index = min(((end, index) for index, end in ends.items()), default=(math.inf, -1))
        now = min(arrival, end)
        while coordinator.due < now:
            for other, load in coordinator.publish(coordinator.due).items():
                router.update(other, load)
        if arrival <= end:
            number, request = waiting.pop(0)
            index = router.route(request.prompt_token_ids)
            counts[index] += 1
            if index not in ends:
                replicas[index].clock.advance_to(now)
                ends[index] = now
            replicas[index].add(number, request, arrival)
            continue
        replica = replicas[index]
        if replica.outputs is None:
            replica.step()
        else:
            coordinator.report(index, replica.outputs.stats.load, now)
            for output in replica.outputs.outputs:
                arrived = requests[int(output.request_id)].arrival_time
                if output.request_id in came:
                    itls.append(now - came[output.request_id])
                else:
                    ttfts.append((output.request_id, now - arrived))
                came[output.request_id] = now
                if output.finished:
                    latencies.append(now - arrived)
                    router.finish(index)
            replica.outputs = None
        ends[index] = replica.clock.now
        if replica.outputs is None and not replica.core.has_unfinished_requests():
            del ends[index]
    return counts, dict(ttfts), itls, latencies


@pytest.mark.parametrize(("num_requests", "num_replicas", "options"), [
    (150, 3, {"rate": 12.0}),
    (150, 70, {"rate": 200.0}),
    (90, 40, {"arrivals": "at-once"}),
    (90, 40, {"arrivals": "bursts", "burst_size": 30, "rate": 100.0}),
])  # fmt: skip
def test_what_is_there_for_speed_changes_no_result(num_requests, num_replicas, options):
    requests = workload(num_requests, **options)
    run = simulate_replicas(requests, num_replicas, routing="least-loaded", **ENGINE)
    counts, ttfts, itls, latencies = simulate_plainly(requests, num_replicas)
    assert run.requests == counts
    assert run.latency.mean == sum(latencies) / num_requests
    for ours, values in ((run.latency, latencies), (run.itl, itls), (run.ttft, ttfts.values())):
        exact = Distribution.of(values)
        assert ours.mean == pytest.approx(exact.mean, rel=1e-12)
        assert ours[1:] == pytest.approx(exact[1:], rel=0.01)


def test_what_a_step_brought_is_known_only_when_it_has_ended():
    """Replica 0 ends its step at 1.0 s. A request at 0.9 s must not see that it will be idle."""
    requests = [WorkloadRequest([1] * 4, 1, 0.0), WorkloadRequest([2] * 4, 1, 0.9), WorkloadRequest([3] * 4, 1, 0.95)]
    run = simulate_replicas(requests, 2, routing="least-loaded", cost_model=lambda work: 1.0, **ENGINE)
    assert run.requests == [2, 1]  # the third waits behind the first, whose end is nearest
    assert run.ttft.mean == pytest.approx((1.0 + 1.0 + 1.05) / 3)


def test_the_least_loaded_replica_is_a_better_choice_than_the_next_one():
    requests = workload(400, rate=16.0, seed=1)
    turns, least = (simulate_replicas(requests, 8, routing=name, **ENGINE) for name in ("round-robin", "least-loaded"))
    assert least.ttft.p99 < 0.8 * turns.ttft.p99
    assert least.imbalance < turns.imbalance


def test_prefixes_are_found_where_they_are_cached():
    rng = random.Random(0)
    conversations = [HashedRequest(float(i), 600, 8, (1000 + i % 16, 2000 + i % 16)) for i in range(64)]
    rng.shuffle(conversations)
    conversations = [item._replace(arrival_time=float(i)) for i, item in enumerate(conversations)]
    requests = list(stream_trace(conversations, max_len=2048))
    options = {"num_gpu_blocks": 400, "max_model_len": 2048, "max_num_seqs": 8, "enable_prefix_caching": True}
    turns, aware = (simulate_replicas(requests, 4, routing=name, **options) for name in ("round-robin", "prefix-aware"))
    assert aware.prefix_hit_rate > 2 * turns.prefix_hit_rate
    assert "prefix-aware" in format_replicas([turns, aware])


def test_bad_input_is_refused_in_a_sentence():
    with pytest.raises(ConfigError, match="num_replicas is 0"):
        simulate_replicas(workload(), 0)
    with pytest.raises(ConfigError, match="no requests"):
        simulate_replicas([], 1)
    with pytest.raises(ConfigError, match="grows to 2000 tokens, but the whole cache holds only"):
        simulate_replicas([WorkloadRequest([1] * 1000, 1000)], 1, **ENGINE)
    with pytest.raises(ConfigError, match="data_parallel_routing is 'best'"):
        simulate_replicas(workload(), 2, routing="best")


def test_a_long_pause_takes_no_time():
    requests = [WorkloadRequest([1] * 10, 5, arrival_time) for arrival_time in (0.0, 1e12, 1e12 + 1)]
    assert simulate_replicas(requests, 2, **ENGINE).completed == 3


def test_percentiles_of_a_histogram_are_exact_to_a_percent():
    rng = random.Random(0)
    values = [rng.lognormvariate(-3, 2) for _ in range(5000)]
    histogram = LatencyHistogram()
    for value in values:
        histogram.add(value)
    exact, ours = Distribution.of(values), histogram.distribution()
    assert ours.mean == pytest.approx(exact.mean)
    assert ours[1:] == pytest.approx(exact[1:], rel=0.01)


def test_traces_are_found_by_name_and_read_from_files(tmp_path):
    packaged = load_trace("azure_2023_conversation.csv.gz")
    assert len(packaged) == 19_366
    file = tmp_path / "mine.jsonl"
    file.write_text('{"timestamp": 500, "input_length": 600, "output_length": 3, "hash_ids": [7, 8]}\n' * 2)
    trace = load_trace(str(file))
    (request, _) = stream_trace(trace, length=0.5, rate_factor=2.0)
    assert request == WorkloadRequest([7] * 256 + [8] * 44, 2)
    with pytest.raises(ConfigError, match=r"There is no trace nothing\.csv .* or one of azure_2023"):
        load_trace("nothing.csv")
    for name, content in (
        ("bad.csv", "a,b\n1,2\n"),
        ("bad.jsonl", '{"timestamp": 1}'),
        ("bad.jsonl.gz", "plain"),
        ("no.csv", ""),
        ("negative.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,-4,5\n"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match="is not a trace"):
            load_trace(str(tmp_path / name))
    with pytest.raises(ConfigError, match="rate_factor is 0"):
        stream_trace(trace, rate_factor=0)


def test_the_command_compares_routers_and_draws_them(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    figure, results = tmp_path / "routing.png", tmp_path / "results.json"
    trace = ["--trace", "azure_2023_conversation.csv.gz", "--length-factor", "0.1", "--rate-factor", "2", "--num-requests", "100"]
    assert (
        main(["simulate", *trace, "--replicas", "3", "--ttft-goal", "500", "--figure", str(figure), "--json", str(results)]) == 0
    )
    printed = capsys.readouterr().out
    assert "100 requests" in printed and "3 replicas, simulated" in printed and "TTFT up to 500 ms" in printed
    assert figure.stat().st_size > 10_000 and '"imbalance"' in results.read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--figure x.png", "--figure compares routers: give --replicas too."),
        ("--routing round-robin", "--routing is for replicas: give --replicas too."),
        ("--replicas 2 --scheduler continuous static", "under one --scheduler: name one."),
        ("--rate-factor 2", "--rate-factor is for a --trace"),
        ("--replicas 2 --save-trace x.json", "are for one engine"),
        ("--replicas 0", "num_replicas is 0"),
        ("--trace nothing.csv", "There is no trace nothing.csv"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, words, capsys):
    assert main(["simulate", *options.split()]) != 0
    assert words in capsys.readouterr().err
