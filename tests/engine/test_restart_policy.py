"""When a process that has died is started again."""

from __future__ import annotations

import sys

from minivllm.data_parallel.processes import RestartPolicy


def test_at_once_after_a_long_life_and_after_growing_pauses_after_short_ones():
    policy = RestartPolicy(4)
    assert [policy.next_pause(lived) for lived in (10.0, 9.9, None, 60.0, 0.0, 1.0, 2.0, 3.0)] == [0, 1, 2, 0, 1, 2, 4, None]


def test_pauses_have_a_limit_however_often_it_dies():
    policy = RestartPolicy(sys.maxsize)
    assert [policy.next_pause(None) for _ in range(2000)][4:] == [16.0] + [32.0] * 1995
