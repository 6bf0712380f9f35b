"""Deciding what runs next and where its cache lies: pure Python, no tensors."""
