"""Observes a learner's prefix cache and scheduler from outside: random blocks, chats and situations, and the results.

See `lesson_04.observe`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from minivllm.course.lessons.lesson_10.budget import observe_admit, observe_continuing, observe_manager, observe_scheduler
from minivllm.course.lessons.lesson_10.cache import observe_hashes, observe_pool
from minivllm.course.lessons.lesson_10.manager import observe_match, observe_offers, observe_room, observe_take

OBSERVERS: Mapping[str, tuple[str, Callable[[Any, random.Random], list[Any]]]] = {
    "check-hash": ("hash_blocks", observe_hashes),
    "check-pool": ("CachingPool", observe_pool),
    "check-match": ("Matching", observe_match),
    "check-room": ("Admitting", observe_room),
    "check-take": ("Taking", observe_take),
    "check-offer": ("MyPrefixManager", observe_offers),
    "check-running": ("Continuing", observe_continuing),
    "check-admit": ("MyBudgetScheduler", observe_admit),
    "check-decisions": ("MyBudgetScheduler", observe_scheduler),
    "check-chat": ("MyPrefixManager", observe_manager),
    "check-spike": ("MyBudgetScheduler", observe_scheduler),
}
"""For each check, what it tests, and how to observe it."""
