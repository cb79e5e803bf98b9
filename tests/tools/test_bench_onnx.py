"""ONNX Runtime's GroupQueryAttention does the same as ours: a step's token is appended, and all are attended."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hostcache import KVGeometry
from tools.bench_attention_run import onnx_rows
from tools.bench_attention_sweep import Shape
from tools.bench_onnx import PRECISIONS, GroupQueryAttention, OnnxRuntime

SEQUENCES, KV_HEADS, GROUP, CONTEXT = 2, 3, 2, 40


@pytest.fixture(name="onnx")
def _onnx() -> OnnxRuntime:
    found = OnnxRuntime.load()
    assert found is not None
    return found


@pytest.mark.parametrize(("precision", "head_dim"), list(itertools.product(PRECISIONS, (64, 128))))
def test_it_attends_over_its_own_kv(onnx: OnnxRuntime, precision: str, head_dim: int) -> None:
    """Softmax in float64 over what lies in K and V afterwards; the newest token is the step's own, the others stay."""
    geometry, heads = KVGeometry(2, KV_HEADS, head_dim), KV_HEADS * GROUP
    peer = GroupQueryAttention(onnx, geometry, heads, SEQUENCES, CONTEXT, dtype=PRECISIONS[precision])
    before = peer.keys.copy()
    peer.attend()

    own = peer.k.reshape(SEQUENCES, KV_HEADS, head_dim)
    for layer in range(peer.layers):
        np.testing.assert_array_equal(peer.keys[layer, :, :, -1], own)
    np.testing.assert_array_equal(peer.keys[:, :, :, :-1], before[:, :, :, :-1])
    q = peer.q.reshape(SEQUENCES, KV_HEADS, GROUP, head_dim).astype(np.float64)
    scores = np.einsum("nhgd,nhtd->nhgt", q, peer.keys[-1]) / np.sqrt(head_dim)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("nhgt,nhtd->nhgd", weights / weights.sum(-1, keepdims=True), peer.values[-1])
    np.testing.assert_allclose(peer.out.reshape(expected.shape), expected, atol=1e-6 if precision == "fp32" else 2e-3)


def test_each_precision_has_a_row_and_no_target(onnx: OnnxRuntime) -> None:
    rows = onnx_rows(Shape(KVGeometry(2, 1, 64), 2, 1, 16), "plain", onnx, 1)
    assert [(row.peer, row.target, row.theirs is None) for row in rows] == [
        ("ONNX Runtime fp32", None, False),
        ("ONNX Runtime fp16", None, False),
    ]
