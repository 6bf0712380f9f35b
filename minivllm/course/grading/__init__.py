"""Grading what learners hand in: `minivllm grade` runs each notebook in a sandboxed kernel and reports its points."""
