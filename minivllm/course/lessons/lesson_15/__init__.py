"""The checks of lesson 15: load, the price of a step, tails, how many replicas, the cheapest fleet, and a rule that changes its size."""

from minivllm.course.lessons.lesson_15.audit import check_audit
from minivllm.course.lessons.lesson_15.fitting import check_fit, check_interrupted
from minivllm.course.lessons.lesson_15.fleet import check_choose_fleet
from minivllm.course.lessons.lesson_15.load import check_loads
from minivllm.course.lessons.lesson_15.replicas import check_bound, check_fewest, check_spares
from minivllm.course.lessons.lesson_15.scaling import check_recommend, check_scaler
from minivllm.course.lessons.lesson_15.tails import check_tail
