from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hostcache.errors import OutsideArena
from npu.contract import check_operands
from npu.device import AttentionJob
from tests.npu.test_emulated_device import bench_with

CACHE_LINE = 64


@pytest.mark.parametrize("inside", [CACHE_LINE, 0])
def test_an_operand_must_end_in_the_buffer_that_it_begins_in(inside: int) -> None:
    """The bytes behind the first buffer are the arena's, too, and another job's."""
    job = bench_with().ready()
    arena = job.buffer.memory.base
    assert isinstance(arena, np.ndarray)
    first = job.buffer.memory.__array_interface__["data"][0] - arena.__array_interface__["data"][0]

    def ending(behind: int) -> AttentionJob:
        """The job with its result so placed that it ends `behind` bytes behind the buffer."""
        start = first + job.buffer.memory.nbytes + behind - job.out.nbytes
        return replace(job, out=arena[start : start + job.out.nbytes].view(np.float16).reshape(job.out.shape))

    check_operands(ending(0))
    with pytest.raises(OutsideArena, match=r"out lies at .* not inside the job's staging buffer"):
        check_operands(ending(job.out.nbytes - inside))
