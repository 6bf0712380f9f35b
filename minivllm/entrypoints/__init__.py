"""Where users come in: the LLM class and the command line."""
