"""Ranks that work on one model: what they tell each other in a step, and how."""
