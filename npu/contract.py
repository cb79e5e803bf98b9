"""What the NPU demands of a job. On a board a breach is a wrong answer or a trap; here each is an error of its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DimensionTooLarge, DirtyTail, Misaligned, NotContiguous, OutsideArena, StagingError
from staging import ALIGNMENT, MASKED, TOKEN_MULTIPLE, StagingLayout

from .canary import CANARY_TOKENS, SHIFTS, canary_keys, canary_query, canary_rows, shift_channel
from .device import MAX_DIMENSION, ROW_MULTIPLE, AttentionJob

__all__ = ["check_content", "check_operands"]


def check_operands(job: AttentionJob) -> None:
    """Check everything about a job but the bytes in its operands.

    Raises:
        DimensionTooLarge: a dimension exceeds `MAX_DIMENSION`.
        NotContiguous: an operand has gaps or runs in another order.
        OutsideArena: an operand is not inside the job's buffer.
        Misaligned: an operand starts off a cache line, or rows or tokens are not padded.
        StagingError: an operand is not fp16, or has another shape than the buffer's layout says.
    """
    layout = job.buffer.layout
    for name, array in job.operands():
        if array.dtype != np.float16:
            raise StagingError(f"{name} is {array.dtype}, the device computes in float16", name=name, dtype=array.dtype)
        _check_shape(name, array.shape, layout)
        if not array.flags.c_contiguous:
            raise NotContiguous(
                f"{name} has strides {array.strides} for shape {array.shape}: copy it to contiguous memory",
                name=name,
                strides=array.strides,
            )
        _check_place(name, array, job.buffer.memory)
    if layout.rows % ROW_MULTIPLE or layout.tokens % TOKEN_MULTIPLE:
        raise Misaligned(
            f"{layout.rows} rows and {layout.tokens} tokens must be padded to multiples of {ROW_MULTIPLE} and "
            f"{TOKEN_MULTIPLE}",
            rows=layout.rows,
            tokens=layout.tokens,
        )


def check_content(
    layout: StagingLayout,
    query: NDArray[np.float16],
    keys: NDArray[np.float16],
    values: NDArray[np.float16],
    mask: NDArray[np.float16],
) -> None:
    """Check the bytes of a job as the device sees them.

    A sequence's tail is what its mask hides from every row but the canary's: all tokens behind the last one that any
    other row sees, up to the canary's two.

    Args:
        layout: of the operands.
        query: as they lie; likewise the others.
        keys: as they lie.
        values: as they lie.
        mask: empty if K carries it.

    Raises:
        StagingError: the mask holds another value than 0 or `MASKED`, hides every token from a row, or shows the
            canary's; a query does not ask for the mask that K carries; or a canary's question is not one.
        DirtyTail: a key or a value in a tail is not zero.
    """
    by_token = {"keys": layout.by_token(keys), "values": layout.by_token(values)}
    bits = mask.view(np.uint16) if layout.mask_rows else _marks(layout, by_token["keys"])
    visible = bits == 0  # fp16 compares one element at a time
    allowed = visible | (bits == MASKED.view(np.uint16))
    if layout.mask_rows:
        allowed[:, -canary_rows(layout) :, -1] = True  # a shift, which is checked with the canary
    if not allowed.all():
        value = float(bits[~allowed].view(np.float16)[0])
        raise StagingError(f"the mask holds {value}, it may hold 0 and {MASKED} only", value=value)
    _check_query(layout, query)
    _check_canary(layout, query, by_token, mask, visible)
    shown = _of_others(layout, visible)[..., :-CANARY_TOKENS]
    blind = np.argwhere(~shown.any(axis=2))
    if len(blind):
        sequence, row = blind[0].tolist()
        raise StagingError(
            f"row {row} of sequence {sequence} sees no token: its softmax would be an average of masked values",
            sequence=sequence,
            row=row,
        )
    lengths = shown.shape[2] - np.any(shown, axis=1)[:, ::-1].argmax(axis=1)
    for name, operand in by_token.items():
        own = operand[:, :-CANARY_TOKENS, : layout.head_dim // operand.shape[-1]]  # without marks
        by_sequence = own.reshape(layout.batch, layout.kv_heads, *own.shape[1:])
        for sequence, length in enumerate(lengths):
            if np.ascontiguousarray(by_sequence[sequence, :, length:]).view(np.uint16).any():
                raise DirtyTail(
                    f"{name} of sequence {sequence} hold bytes behind its {length} tokens: zero the tail",
                    name=name,
                    sequence=sequence,
                    length=int(length),
                )


def _marks(layout: StagingLayout, keys: NDArray[np.float16]) -> NDArray[np.uint16]:
    """The mask that K carries, uint16 `[batch, 1, tokens]`.

    Raises:
        StagingError: heads of a sequence differ, or a channel that has no meaning is not zero.
    """
    marks = np.ascontiguousarray(keys[:, :, -1]).view(np.uint16)  # [heads, tokens, MARK_CHANNELS]
    unused = marks[:, :-CANARY_TOKENS, 1:]  # the canary's are checked apart
    by_sequence = marks[..., 0].reshape(layout.batch, layout.kv_heads, layout.tokens)
    if unused.any() or (by_sequence != by_sequence[:, :1]).any():
        raise StagingError("K's mark channels differ between the heads of a sequence, or hold more than a mask")
    return by_sequence[:, :1]


def _check_query(layout: StagingLayout, query: NDArray[np.float16]) -> None:
    """Where K carries the mask, every row but the canary's must add it to its scores."""
    marks = query[:, : -canary_rows(layout), layout.head_dim :]
    expected = np.zeros(marks.shape[2], np.float16)
    expected[:1] = 1
    if (marks != expected).any():
        raise StagingError("a query's mark channels do not ask for the mask that K carries: padding would be attended")


def _check_canary(
    layout: StagingLayout,
    query: NDArray[np.float16],
    by_token: dict[str, NDArray[np.float16]],
    mask: NDArray[np.float16],
    visible: NDArray[np.bool_],
) -> None:
    """Its rows alone must see its tokens, and no others; and each of their scores' shifts must be one."""
    rows, channel = canary_rows(layout), shift_channel(layout)
    keys = np.array(by_token["keys"][:, -CANARY_TOKENS:]).reshape(layout.heads, CANARY_TOKENS, -1)
    asked = query[:, -rows:].copy()
    shifts = [keys[:, -1, channel].copy(), asked[..., channel + 1].copy()]
    keys[:, -1, channel] = asked[..., channel + 1] = 0
    first, second = by_token["values"][:, -CANARY_TOKENS:].swapaxes(0, 1)
    sound = (
        (keys == canary_keys(layout)).all()
        and (asked == canary_query(layout)).all()
        and (np.abs([first, second]) == 1).all()
        and (first != second).any(axis=(1, 2)).all()
        and not _of_others(layout, visible)[..., -CANARY_TOKENS:].any()
    )
    if layout.mask_rows:
        shifts.append(mask[:, -rows:, -1])
        sound = sound and visible[:, -rows:, -2].all() and not visible[:, -rows:, :-CANARY_TOKENS].any()
    if not (sound and all(np.isin(drawn, SHIFTS).all() for drawn in shifts)):
        raise StagingError(
            "the last two tokens are not a canary that the last rows alone see: a stale operand or result could not be "
            "told from a fresh one"
        )


def _of_others(layout: StagingLayout, visible: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which tokens rows see, without the canary's; if K carries the mask, one row stands for all."""
    return visible[:, : -canary_rows(layout)] if layout.mask_rows else visible


def _check_shape(name: str, shape: tuple[int, ...], layout: StagingLayout) -> None:
    largest = max(shape, default=0)
    if largest > MAX_DIMENSION:
        raise DimensionTooLarge(
            f"{name} has a dimension of {largest}, the NPU's registers end at {MAX_DIMENSION}: "
            "use a smaller bucket, tile or batch",
            name=name,
            dimension=largest,
            limit=MAX_DIMENSION,
        )
    expected = getattr(layout, f"{name}_shape")
    if shape != expected:
        raise StagingError(f"{name} has shape {shape}, its buffer's layout says {expected}", name=name, shape=shape)


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
