"""The checks of lesson 11: an asynchronous engine, from a stream for each client to a server that the official client talks to."""

from minivllm.course.lessons.lesson_11.app import check_app
from minivllm.course.lessons.lesson_11.beside import compare_servers
from minivllm.course.lessons.lesson_11.engine import check_death, check_generate, check_hang_up
from minivllm.course.lessons.lesson_11.events import check_chat_events, check_completion_events, check_format_event
from minivllm.course.lessons.lesson_11.loop import check_core_loop
from minivllm.course.lessons.lesson_11.server import check_server
from minivllm.course.lessons.lesson_11.streams import check_stream
from minivllm.course.lessons.lesson_11.text import check_with_text

STAND_INS = {"check-server": "check-app"}
"""For checks on the real model, the check that the grader runs with other input."""
