"""A tiny model for workers in processes."""

from __future__ import annotations

import pytest
from steps_in_processes import save_tiny_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Its folder."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))
