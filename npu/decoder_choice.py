"""Chooses what computes the dense parts on the CPU."""

from __future__ import annotations

import os

from .decoder import Decoder
from .model import ModelConfig
from .source import ModelSource
from .tiled_decoder import TiledDecoder
from .tiled_weights import matrix_names
from .tiles import TilePlan, plan_tiles
from .weights import Activations

__all__ = ["load_decoder", "tiles_of"]


def tiles_of(source: ModelSource, config: ModelConfig, activations: Activations) -> TilePlan | None:
    """The tiles that a model will be multiplied by: those of its own weights, where activations are int8.

    Returns:
        None where ONNX Runtime computes it: with float activations, or if a matrix is of a type without tiles.
    """
    return plan_tiles(source, matrix_names(config)) if activations == "int8" else None


def load_decoder(
    source: ModelSource,
    *,
    activations: Activations = "int8",
    threads: int = 1,
    max_rows: int = 256,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Decoder | TiledDecoder:
    """Load the faster of the decoders that can compute a model; the arguments are those of `Decoder.load`.

    Raises:
        RockpageError: as `Decoder.load` and `TiledDecoder.load`.
    """
    config = ModelConfig.from_gguf(source)
    plan = tiles_of(source, config, activations)
    if plan is not None:
        return TiledDecoder.load(source, config, plan, threads=threads, max_rows=max_rows, cache_dir=cache_dir)
    return Decoder.load(source, activations=activations, threads=threads, max_rows=max_rows, cache_dir=cache_dir)
