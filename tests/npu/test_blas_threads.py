from __future__ import annotations

import numpy as np
import pytest

from npu.blas_threads import _thread_counts, one_blas_thread


def test_threads_of_openblas_are_one_for_a_while() -> None:
    """numpy's wheels have OpenBLAS in them, so there is one to set."""
    assert "openblas" in str(np.show_config(mode="dicts")).lower()
    counts = list(_thread_counts())
    assert counts
    before = [get() for get, _ in counts]
    for _, put in counts:
        put(2)
    try:
        with one_blas_thread():
            assert [get() for get, _ in counts] == [1] * len(counts)
        assert [get() for get, _ in counts] == [2] * len(counts)
        with pytest.raises(KeyError), one_blas_thread():
            raise KeyError
        assert [get() for get, _ in counts] == [2] * len(counts)
    finally:
        for (_, put), count in zip(counts, before, strict=True):
            put(count)
