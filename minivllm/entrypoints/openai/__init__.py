"""OpenAI's protocol: requests, responses, and how the engine's outputs become them."""
