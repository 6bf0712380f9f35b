"""A server that is started to be measured: waited for, looked at, ended, and its failure told."""

from __future__ import annotations

import time

import psutil
import pytest

from minivllm.bench.server_process import HealthProbe, start_server
from minivllm.errors import ConfigError

SERVER = """
import http.server, subprocess, sys, time
time.sleep(0.3)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        if "--slow" in sys.argv and Handler.asked == 4:
            time.sleep(1)
        self.send_response(503 if "--ill" in sys.argv and Handler.asked > 3 else 200)
        self.end_headers()
        if self.path == "/metrics":
            self.wfile.write(b'# TYPE seen counter\\nseen_total{model="a"} 2\\nseen_total{model="b"} 3\\n')
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
"""A child process, /health and /metrics; with --ill its health ends soon, with --slow one answer takes a second."""


def test_it_is_ready_when_it_is_given_and_gone_with_its_children_afterwards():
    with start_server(program=("-c", SERVER)) as server:
        processes = server.processes()
        assert len(processes) == 2
        assert server.metrics() == {"seen_total": 5.0}
        assert server.num_file_descriptors() > 2
    assert psutil.wait_procs(processes, timeout=5)[1] == []


def test_paused_it_rests_with_its_children():
    with start_server(program=("-c", SERVER)) as server:
        with server.paused():
            time.sleep(0.1)
            assert {process.status() for process in server.processes()} == {psutil.STATUS_STOPPED}
        assert server.metrics()


def test_a_server_that_cannot_start_says_why():
    with (
        pytest.raises(ConfigError, match=r"`minivllm serve no-model` ended with status 1: There is no such model\."),
        start_server("no-model", program=("-c", "raise SystemExit('There is no such model.')")),
    ):
        pass


def test_health_is_asked_for_again_and_again_and_its_end_is_noticed():
    with start_server("--ill", program=("-c", SERVER)) as server, HealthProbe(server.port, 0.05) as probe:
        time.sleep(0.6)
    assert 3 < len(probe.seconds) <= 13
    assert len(probe.seconds) - 3 <= probe.failures < len(probe.seconds)


def test_a_second_without_an_answer_is_late_for_all_who_would_have_asked_in_it():
    with start_server("--slow", program=("-c", SERVER)) as server, HealthProbe(server.port, 0.1) as probe:
        time.sleep(2)
    late = [seconds for seconds in probe.seconds if seconds > 0.25]
    assert max(late) >= 1 and len(late) >= 4, "asked after 0.1 s of that second, after 0.2 s, ..."
    assert probe.failures == 0
