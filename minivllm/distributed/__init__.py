"""Communication between the ranks that share a model."""
