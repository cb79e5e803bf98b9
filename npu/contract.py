"""What the NPU demands of a job. On a board a breach is a wrong answer or a trap; here each is an error of its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DimensionTooLarge, DirtyTail, Misaligned, NotContiguous, OutsideArena, StagingError
from staging import ALIGNMENT, TOKEN_MULTIPLE

from .device import MASKED, MAX_DIMENSION, ROW_MULTIPLE, AttentionJob

__all__ = ["check_content", "check_operands"]


def check_operands(job: AttentionJob) -> None:
    """Check everything about a job but the bytes in its operands.

    Raises:
        DimensionTooLarge: a dimension exceeds `MAX_DIMENSION`.
        NotContiguous: an operand has gaps or runs in another order.
        OutsideArena: an operand is not inside the job's buffer.
        Misaligned: an operand starts off a cache line, or rows or tokens are not padded.
        StagingError: an operand is not fp16, or the shapes do not fit each other.
    """
    for name, array in job.operands():
        if array.dtype != np.float16:
            raise StagingError(f"{name} is {array.dtype}, the device computes in float16", name=name, dtype=array.dtype)
        _check_dimensions(name, array)
        if not array.flags.c_contiguous:
            raise NotContiguous(
                f"{name} has strides {array.strides} for shape {array.shape}: copy it to contiguous memory",
                name=name,
                strides=array.strides,
            )
        _check_place(name, array, job.buffer.memory)
    _check_shapes(job)


def check_content(keys: NDArray[np.float16], values: NDArray[np.float16], mask: NDArray[np.float16]) -> None:
    """Check the bytes of a job as the device sees them.

    A sequence's tail is what its mask hides from every row: all tokens behind the last one that any row sees.

    Raises:
        StagingError: the mask holds another value than 0 or `MASKED`, or hides every token from a row.
        DirtyTail: a key or a value in a tail is not zero.
    """
    bits = mask.view(np.uint16)  # fp16 compares one element at a time
    visible = bits == 0
    allowed = visible | (bits == MASKED.view(np.uint16))
    if not allowed.all():
        value = float(mask[~allowed][0])
        raise StagingError(f"the mask holds {value}, it may hold 0 and {MASKED} only", value=value)
    blind = np.argwhere(~visible.any(axis=1))
    if len(blind):
        sequence, row = blind[0].tolist()
        raise StagingError(
            f"row {row} of sequence {sequence} sees no token: its softmax would be an average of masked values",
            sequence=sequence,
            row=row,
        )
    batch, tokens = mask.shape[:2]
    lengths = tokens - visible.any(axis=2)[:, ::-1].argmax(axis=1)
    for name, array in (("keys", keys), ("values", values)):
        by_sequence = array.reshape(batch, -1, *array.shape[1:]).view(np.uint16)
        for sequence, length in enumerate(lengths):
            if by_sequence[sequence, :, length:].any():
                raise DirtyTail(
                    f"{name} of sequence {sequence} hold bytes behind its {length} tokens: zero the tail",
                    name=name,
                    sequence=sequence,
                    length=int(length),
                )


def _check_dimensions(name: str, array: NDArray[np.float16]) -> None:
    largest = max(array.shape, default=0)
    if array.ndim != 3 or array.size == 0:
        raise StagingError(f"{name} has shape {array.shape}, not three positive dimensions", shape=array.shape)
    if largest > MAX_DIMENSION:
        raise DimensionTooLarge(
            f"{name} has a dimension of {largest}, the NPU's registers end at {MAX_DIMENSION}: "
            "use a smaller bucket, tile or batch",
            name=name,
            dimension=largest,
            limit=MAX_DIMENSION,
        )


def _check_place(name: str, array: NDArray[np.float16], memory: NDArray[np.uint8]) -> None:
    start = array.__array_interface__["data"][0]
    offset = start - memory.__array_interface__["data"][0]
    if not 0 <= offset <= memory.nbytes - array.nbytes:
        raise OutsideArena(
            f"{name} lies at {start:#x}, {array.nbytes} bytes: not inside the job's staging buffer",
            name=name,
            address=start,
            nbytes=array.nbytes,
        )
    if start % ALIGNMENT:
        raise Misaligned(f"{name} lies at {start:#x}, not on {ALIGNMENT} bytes", name=name, address=start)


def _check_shapes(job: AttentionJob) -> None:
    heads, rows, head_dim = job.query.shape
    tokens = job.keys.shape[1]
    if rows % ROW_MULTIPLE or tokens % TOKEN_MULTIPLE:
        raise Misaligned(
            f"{rows} rows and {tokens} tokens must be padded to multiples of {ROW_MULTIPLE} and {TOKEN_MULTIPLE}",
            rows=rows,
            tokens=tokens,
        )
    batch, mask_tokens, mask_rows = job.mask.shape
    fits = (
        job.keys.shape == job.values.shape == (heads, tokens, head_dim)
        and job.out.shape == job.query.shape
        and heads % batch == 0
        and mask_tokens == tokens
        and mask_rows in (1, rows)
    )
    if not fits:
        shapes = {name: array.shape for name, array in job.operands()}
        raise StagingError(f"the operands' shapes do not fit each other: {shapes}", shapes=shapes)
