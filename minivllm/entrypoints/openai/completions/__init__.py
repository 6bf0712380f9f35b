"""Text completion: `POST /v1/completions`."""
