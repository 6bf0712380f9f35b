"""The checks of lesson 13: a replica's threads, the coordinator's table, two routers, and a client that loses no token."""

from minivllm.course.lessons.lesson_13.engine import check_kill
from minivllm.course.lessons.lesson_13.failover import check_sending, check_surviving, check_taking
from minivllm.course.lessons.lesson_13.poison import check_poison, check_storm
from minivllm.course.lessons.lesson_13.replica import check_loop, check_wires
from minivllm.course.lessons.lesson_13.routing import check_coordinator, check_least_loaded, check_prefix
from minivllm.course.lessons.lesson_13.threads import check_threads

STAND_INS = {"check-kill": "check-storm"}
"""For the check on the real model, the check that the grader runs with other input."""
