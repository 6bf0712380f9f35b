"""The engine: requests in, steps, outputs out."""
