"""Oracles for the decoder: a plain contiguous cache, and a float64 forward pass that shares no code with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize
from numpy.typing import NDArray

from npu.decoder import Decoder
from npu.tiled_decoder import TiledDecoder

__all__ = ["PlainSession", "Sight", "log_softmax", "reference_logits"]


class PlainSession:
    """One sequence behind a decoder, its K and V in plain float32 arrays `[layers, tokens, kv_heads, d]`.

    Attention takes one row at a time, so that a row's bits cannot depend on its neighbours in a step.

    Args:
        decoder: the dense parts.
        capacity: most tokens the session can hold.
        jitter: changes attention's outputs by some 1e-6, as another order of its sums would; None for exact ones.
    """

    def __init__(
        self, decoder: Decoder | TiledDecoder, capacity: int = 256, jitter: np.random.Generator | None = None
    ) -> None:
        config = decoder.config
        self._decoder = decoder
        self._jitter = jitter
        self.k = np.zeros((config.layers, capacity, config.kv_heads, config.head_dim), np.float32)
        self.v = np.zeros_like(self.k)
        self.tokens = 0

    def step(self, ids: list[int], rows: list[int] | None = None) -> NDArray[np.float32]:
        """Append tokens; logits of `rows`, or of all."""
        start = self.tokens
        self.tokens += len(ids)

        def attend(
            layer: int,
            q: NDArray[np.float32],
            k: NDArray[np.float32],
            v: NDArray[np.float32],
            out: NDArray[np.float32],
        ) -> None:
            self.k[layer, start : self.tokens] = k
            self.v[layer, start : self.tokens] = v
            window = self._decoder.config.windows[layer] or start + len(q)
            for row in range(len(q)):
                seen = slice(max(0, start + row + 1 - window), start + row + 1)
                out[row] = attend_one(q[row], self.k[layer, seen], self.v[layer, seen])
            if self._jitter:
                out *= 1 + np.float32(1e-6) * self._jitter.standard_normal(out.shape, np.float32)

        positions = np.arange(start, self.tokens, dtype=np.int32)
        wanted = np.array(range(len(ids)) if rows is None else rows, np.int64)
        return self._decoder.forward(np.array(ids, np.int32), positions, wanted, attend)


def attend_one(q: NDArray[Any], k: NDArray[Any], v: NDArray[Any]) -> NDArray[Any]:
    """Attention of one token: q `[heads, d]` over k, v `[tokens, kv_heads, d]`, heads in groups per KV head."""
    grouped = q.reshape(k.shape[1], -1, q.shape[1])
    scores = np.einsum("hgd,thd->hgt", grouped, k) / np.sqrt(q.shape[1])
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out: NDArray[Any] = np.einsum("hgt,thd->hgd", weights, v).reshape(q.shape)
    return out


@dataclass(frozen=True)
class Sight:
    """What a token sees of those before it, and from how far.

    Attributes:
        window: newest tokens that it sees, itself included; 0: all.
        sinks: first tokens that it sees besides.
        context: positions there are, for a sequence that goes on past them; 0: as many as it has tokens.
        block: the tokens that stay in front, and those that are given up behind them, are multiples of this.
    """

    window: int = 0
    sinks: int = 0
    context: int = 0
    block: int = 16

    def seen(self, row: int) -> NDArray[np.int64]:
        """Indices of the tokens that the one at `row` sees, ascending."""
        indices = np.arange(row + 1)
        return indices[(indices < self.sinks) | (indices > row - self.window)] if self.window else indices

    def turned(self, row: int) -> int:
        """By how many positions the tokens behind the front have moved towards it when that at `row` is computed.

        Whenever the next position would be `context`, what lies between the front and the oldest whole block of the
        window is given up.
        """
        turned = 0
        while self.context and row - turned >= self.context:
            at = self.context + turned  # the row that found no position
            turned = (at - self.window + 1) // self.block * self.block - self.front
        return turned

    @property
    def front(self) -> int:
        """Tokens that never move."""
        return -(-self.sinks // self.block) * self.block

    def positions(self, indices: NDArray[np.int64], row: int) -> NDArray[np.int64]:
        """Where tokens are for the one at `row`."""
        return np.where(indices < self.front, indices, indices - self.turned(row))


def log_softmax(logits: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Log-probabilities of each row, in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    out: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return out


def reference_logits(path: Path, ids: list[int], sight: Sight = Sight()) -> NDArray[np.float64]:
    """Logits `[tokens, vocab]` of a GGUF file by the gguf package's reader and float64 throughout.

    Which family it is shows in its tensors, but for the pairs that turn together: a llama's are neighbours. Of the
    scalings it knows the linear one and factors of frequencies.
    """
    reader = gguf.GGUFReader(path)
    weights = {t.name: dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}
    family = reader.fields["general.architecture"].contents()

    def key(name: str, default: Any = None) -> Any:
        field = reader.fields.get(f"{family}.{name}")
        return default if field is None else field.contents()

    eps, theta, d = key("attention.layer_norm_rms_epsilon"), key("rope.freq_base"), key("attention.key_length")
    slowed_by = key("rope.scaling.factor", 1.0) * weights.get("rope_freqs.weight", 1.0)
    angles = np.arange(len(ids))[:, None] * theta ** (-np.arange(0, d, 2) / d) / slowed_by
    turns = key("rope.scaling.attn_factor", 1.0) * np.exp(1j * angles)[:, None]  # one complex number per pair
    seen = [sight.seen(row) for row in range(len(ids))]
    seen_at = [sight.positions(indices, row) for row, indices in enumerate(seen)]
    x = weights["token_embd.weight"][ids]

    def norm(x: NDArray[np.float64], name: str) -> NDArray[np.float64]:
        out: NDArray[np.float64] = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weights[name]
        return out

    def heads_of(h: NDArray[np.float64], block: str, name: str) -> NDArray[np.float64]:
        out = h @ weights[f"{block}.attn_{name}.weight"].T + weights.get(f"{block}.attn_{name}.bias", 0)
        heads = out.reshape(len(ids), -1, d)
        return (
            norm(heads, f"{block}.attn_{name}_norm.weight") if f"{block}.attn_{name}_norm.weight" in weights else heads
        )

    def rotate(heads: NDArray[np.float64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
        axis, shape = (-1, (d // 2, 2)) if family == "llama" else (-2, (2, d // 2))
        first, second = np.moveaxis(heads.reshape(*heads.shape[:2], *shape), axis, 0)
        turned = (first + 1j * second) * turns[positions]
        return np.stack([turned.real, turned.imag], axis).reshape(heads.shape)

    for layer in range(key("block_count")):
        block = f"blk.{layer}"
        w = {name: weights[f"{block}.{name}.weight"] for name in _MATRICES}
        h = norm(x, f"{block}.attn_norm.weight")
        q, k, v = (heads_of(h, block, name) for name in "qkv")
        heads = np.stack(
            [
                attend_one(rotate(q[row : row + 1], at[-1:])[0], rotate(k[rows], at), v[rows])
                for row, (rows, at) in enumerate(zip(seen, seen_at, strict=True))
            ]
        )
        x = x + heads.reshape(len(ids), -1) @ w["attn_output"].T
        h = norm(x, f"{block}.ffn_norm.weight")
        gate = h @ w["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    logits: NDArray[np.float64] = (
        norm(x, "output_norm.weight") @ weights.get("output.weight", weights["token_embd.weight"]).T
    )
    return logits


_MATRICES = ("attn_output", "ffn_gate", "ffn_up", "ffn_down")
