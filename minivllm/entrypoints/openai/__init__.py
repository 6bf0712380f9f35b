"""OpenAI's protocol: what requests and answers look like, and how the engine's outputs become answers."""
