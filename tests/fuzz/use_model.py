"""Takes a model's files the whole way: opening, tokenizer, template, weights and graphs, tiles, and a conversion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from npu.carried_metadata import carried_metadata
from npu.convert import convert_model
from npu.decoder import embedder
from npu.decoder_choice import tiles_of
from npu.generation_config import GenerationConfig
from npu.gguf import GGUFFile
from npu.graphs import SegmentGraphs
from npu.huggingface import HuggingFaceFolder
from npu.model import ModelConfig
from npu.source import open_model
from npu.text import template_of, tokenizer_of
from npu.tiled_decoder import TiledDecoder
from npu.tiled_weights import TiledWeights
from npu.weights import Activations, plan_weights
from tests.fuzz.guard import refusals

__all__ = ["use_model"]

_TEXT = "Ab  12 \u00c4rger\u2581<|im_end|>\n\U0001f642"


def use_model(path: Path) -> None:
    """Do with a model all that loading and converting do, up to ONNX Runtime; each part may be refused by itself."""
    with refusals(), open_model(path) as source:
        with refusals():
            _use_tokenizer(source)
        with refusals():
            template_of(source)
        for activations in ("int8", "fp32"):
            with refusals():
                _use_weights(source, activations, path.with_name("weights"))
        with refusals():
            _use_tiles(source, path.with_name("tiles"))
        with refusals():
            ModelConfig.from_gguf(source)
            out = path.with_name("out.gguf")
            out.unlink(missing_ok=True)
            convert_model(source, carried_metadata(source), "int4", out)


def _use_tokenizer(source: GGUFFile | HuggingFaceFolder) -> None:
    if isinstance(source, HuggingFaceFolder):
        with refusals():
            GenerationConfig.from_folder(source.path)
    tokenizer = tokenizer_of(source)
    for special in (False, True):
        tokenizer.decode(tokenizer.encode(_TEXT, special=special), special=special)
    tokenizer.decode(range(tokenizer.vocab_size), special=True)


def _use_weights(source: GGUFFile | HuggingFaceFolder, activations: Activations, out: Path) -> None:
    config = ModelConfig.from_gguf(source)
    plan = plan_weights(source, config, activations)
    with out.open("w+b") as file:
        plan.write(source, file)
    graphs = SegmentGraphs(source, config, plan, activations)
    graphs.first()
    graphs.last()


def _use_tiles(source: GGUFFile | HuggingFaceFolder, out: Path) -> None:
    """Compute a step of three tokens, all of them the first of the vocabulary."""
    config = ModelConfig.from_gguf(source)
    plan = tiles_of(source, config, "int8")
    if plan is None:
        return
    with out.open("w+b") as file:
        plan.write(source, file)
    weights, embed = TiledWeights(source, config, plan, out), embedder(source, config)
    decoder = TiledDecoder(weights, config, embed, fingerprint="", max_rows=3)

    def attend(layer: int, *arrays: NDArray[np.float32]) -> None:
        arrays[-1].fill(0.5)

    tokens = np.zeros(3, np.int32)
    with np.errstate(all="ignore"):  # scales may be anything
        decoder.forward(tokens, tokens, np.arange(3), attend)
    decoder.close()
