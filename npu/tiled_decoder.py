"""Runs the dense parts of a decoder on the CPU in C, on tiles of the model's own quantised weights."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import UsageError
from hostcache.geometry import KVGeometry

from ._dense import ffi, lib
from .decoder import Attend, Floats, check_limits, check_step, embedder
from .machine_identity import machine_identity
from .model import ModelConfig
from .onnx_graph import WEIGHTS_FILE
from .source import ModelSource
from .tiled_weights import TiledWeights
from .tiles import TILE_VERSION, TilePlan
from .weights_cache import default_cache_dir, model_digest, weights_folder

__all__ = ["TiledDecoder"]


class TiledDecoder:
    """A loaded model of quantised weights, with int8 activations. One step at a time, like `Decoder`.

    A token's K, V and logits are the same, bit for bit, in a step of any size, with any number of threads and with
    every instruction set. The weights stay mapped: they are no memory of this process's own.

    Args:
        weights: what is multiplied by.
        config: the model's dimensions.
        embed: from token ids to rows of the embedding.
        fingerprint: SHA-256 of the model file, in hex.
        max_rows: most tokens of one step.
        threads: threads of a product, the caller's included; the others sleep between calls.
        isa: `"avx512"` (with VNNI), `"avx2"`, `"neon"` (with dot products), `"plain"`, or `"auto"` for the best this
            machine has.

    Attributes:
        numerics: names everything here that can change a bit of K or V.
        weights_bytes: bytes of the tiles.
        isa: what `"auto"` became.

    Raises:
        UsageError: this machine cannot give so many threads, buffers for so many rows, or such an `isa`.
    """

    def __init__(
        self,
        weights: TiledWeights,
        config: ModelConfig,
        embed: Callable[[NDArray[np.int32]], Floats],
        *,
        fingerprint: str,
        max_rows: int = 256,
        threads: int = 1,
        isa: str = "auto",
    ) -> None:
        runtime = lib.rp_dense_open(weights.model, max_rows, threads, isa.encode())
        if runtime == ffi.NULL:
            raise _open_error(ffi.errno, threads, max_rows, isa)
        self.isa = ffi.string(lib.rp_dense_isa(runtime)).decode()
        self.config = config
        self.fingerprint = fingerprint
        # The kernels' bits are the same on every machine; those of numpy's cosines need not be.
        parts = (f"tiles-{TILE_VERSION}", "int8", f"numpy-{np.__version__}", machine_identity())
        self.numerics = "/".join((*parts, config.positions_identity))
        self.weights_bytes = weights.nbytes
        self.max_rows = max_rows
        self._runtime = ffi.gc(runtime, lib.rp_dense_close)
        self._weights = weights  # the runtime does not keep them
        self._embed = embed
        self._frequencies = config.rope.frequencies(config.head_dim)
        self._rows = _Rows(config, max_rows)
        self._closed = False

    @classmethod
    def load(
        cls,
        source: ModelSource,
        config: ModelConfig,
        plan: TilePlan,
        *,
        threads: int = 1,
        max_rows: int = 256,
        cache_dir: str | os.PathLike[str] | None = None,
        isa: str = "auto",
    ) -> TiledDecoder:
        """Tile a model's weights if the cache does not have them yet, and map them.

        Args:
            source: the open model; it may be closed afterwards.
            config: its dimensions.
            plan: of its matrices, see `npu.decoder_choice.tiles_of`.
            threads: as in the constructor, and so the others.
            max_rows: buffers are allocated for as many.
            cache_dir: root of the weights cache; None for `$XDG_CACHE_HOME/rockpage`.
            isa: as in the constructor.

        Raises:
            UsageError: an argument is out of its range, or the tiles fit nowhere on disk.
            BadModelFile: the model's file was replaced meanwhile.
        """
        check_limits(threads, max_rows)
        root = default_cache_dir() if cache_dir is None else Path(cache_dir)
        fingerprint = model_digest(source, root)
        with weights_folder(source, plan, fingerprint, f"tiles{TILE_VERSION}", root) as folder:
            weights = TiledWeights(source, config, plan, folder / WEIGHTS_FILE)
        return cls(
            weights,
            config,
            embedder(source, config),
            fingerprint=fingerprint,
            max_rows=max_rows,
            threads=threads,
            isa=isa,
        )

    @property
    def geometry(self) -> KVGeometry:
        """Shape of the model's KV cache."""
        return self.config.geometry

    def forward(
        self, tokens: NDArray[np.int32], positions: NDArray[np.int32], logit_rows: NDArray[np.int64], attend: Attend
    ) -> Floats:
        """Compute one step; see `npu.decoder.Decoder.forward`.

        Raises:
            UsageError: likewise, or the decoder is closed.
        """
        if self._closed:
            raise UsageError("this decoder is closed: load the model again")
        check_step(self.config, self.max_rows, tokens, positions, logit_rows)
        runtime, rows, layers, m = self._runtime, self._rows, self._weights.layers, len(tokens)
        rows.residual[:m] = self._embed(tokens)
        self.config.rope.write_angles(positions, self._frequencies, rows.cosine, rows.sine)
        q, k, v, attended = (array[:m] for array in (rows.q, rows.k, rows.v, rows.attended))
        for number, layer in enumerate(layers):
            lib.rp_dense_before(
                runtime, layer, m, rows.at_residual, rows.at_cosine, rows.at_sine, rows.at_q, rows.at_k, rows.at_v
            )
            attend(number, q, k, v, attended)
            if number + 1 < len(layers):
                lib.rp_dense_after(runtime, layer, m, rows.at_attended, rows.at_residual)
        wanted = len(logit_rows)
        logits = np.empty((wanted, self.config.vocab), np.float32)
        if wanted:  # behind the last attention nobody needs the others
            rows.residual[:wanted] = rows.residual[logit_rows]
            rows.attended[:wanted] = rows.attended[logit_rows]
            lib.rp_dense_after(runtime, layers[-1], wanted, rows.at_attended, rows.at_residual)
            lib.rp_dense_head(runtime, wanted, rows.at_residual, ffi.from_buffer("float[]", logits))
        return logits

    def close(self) -> None:
        """Join the threads and free the buffers; later steps are refused. Safe to call twice."""
        self._closed = True
        ffi.release(self._runtime)


class _Rows:
    """What the dense parts and attention hand to each other, and where it lies: a pointer costs more than a call."""

    def __init__(self, config: ModelConfig, max_rows: int) -> None:
        def rows(*width: int) -> Floats:
            return np.zeros((max_rows, *width), np.float32)

        self.residual = rows(config.hidden)
        self.q, self.attended = (rows(config.heads, config.head_dim) for _ in range(2))
        self.k, self.v = (rows(config.kv_heads, config.head_dim) for _ in range(2))
        self.cosine, self.sine = (rows(config.head_dim // 2) for _ in range(2))
        self.at_residual, self.at_q, self.at_k, self.at_v, self.at_attended, self.at_cosine, self.at_sine = (
            ffi.from_buffer("float[]", array)
            for array in (self.residual, self.q, self.k, self.v, self.attended, self.cosine, self.sine)
        )


def _open_error(number: int, threads: int, max_rows: int, isa: str) -> UsageError:
    if number == errno.ENOTSUP:
        return UsageError(f'isa "{isa}" does not run on this machine: use "auto"', isa=isa)
    return UsageError(
        f"there is no room for {threads} threads and steps of {max_rows} tokens ({os.strerror(number)}): use fewer",
        threads=threads,
        max_rows=max_rows,
    )
