"""The live page at `/`: the KV cache and the batch while the server runs. See `app.py`."""
