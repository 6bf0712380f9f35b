"""The figure that compares routers."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from minivllm.bench.workloads import generate_requests
from minivllm.simulation.engine import simulate_replicas
from minivllm.viz.routing import draw_routing


@pytest.mark.parametrize(("num_replicas", "has_cache"), [(1, False), (3, True), (40, False)])
def test_each_router_has_its_times_and_its_replicas(num_replicas, has_cache):
    runs = [
        simulate_replicas(
            generate_requests(60, arrival_rate=3.0, num_shared_prompt_tokens=64, max_len=512),
            num_replicas,
            routing=routing,
            max_model_len=512,
            enable_prefix_caching=has_cache,
        )
        for routing in ("round-robin", "prefix-aware")
    ]
    figure = draw_routing(runs)
    figure.canvas.draw()
    assert len(figure.axes) == 2 + has_cache
    times, loads = figure.axes[0], figure.axes[-1]
    assert [bar.get_height() for bar in times.patches] == [
        getattr(run.ttft, name) for run in runs for name in ("p50", "p95", "p99")
    ]
    assert [text.get_text() for text in times.get_legend().get_texts()] == ["round-robin", "prefix-aware"]
    assert [sorted(line.get_ydata()) for line in loads.lines] == [sorted(run.mean_in_flight) for run in runs]
    if has_cache:
        assert [bar.get_height() for bar in figure.axes[1].patches] == [100 * run.prefix_hit_rate for run in runs]
        assert runs[1].prefix_hit_rate > 0
