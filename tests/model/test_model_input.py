"""How a step is laid out: block tables that stay from step to step, and one copy to the device."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from minivllm.worker.model_input import BlockTables
from minivllm.worker.transfer import pack_to_device

TABLES = st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=7), min_size=1, max_size=5)


@given(st.lists(TABLES, min_size=1, max_size=8), st.data())
def test_block_tables_are_those_of_the_step_whatever_came_before(steps, data):
    kept, results = BlockTables(), []
    for tables in steps:
        results.append((kept.update(tables), [list(table) for table in tables]))
        grown = data.draw(st.integers(0, len(tables) - 1))
        tables[grown].append(data.draw(st.integers(0, 99)))  # the scheduler's own list, which it goes on using
        results.append((kept.update(tables), [list(table) for table in tables]))
    for array, tables in results:
        width = max(map(len, tables))
        assert array.tolist() == [table + [0] * (width - len(table)) for table in tables]
        assert array.dtype == np.int32


def test_one_buffer_holds_all_arrays():
    arrays = [np.arange(7), np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros(0, np.int64), np.array([2**40, -1])]
    parts = pack_to_device(arrays, torch.device("cpu"))
    assert [part.tolist() for part in parts] == [array.tolist() for array in arrays]
    assert [part.dtype for part in parts] == [torch.int64, torch.int32, torch.int64, torch.int64]
    assert len({part.untyped_storage().data_ptr() for part in parts}) == 1
