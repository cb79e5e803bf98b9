from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from npu.gguf import GGUFFile
from npu.model import ModelConfig
from tests.board.random_model import REFERENCE, write_random_model

SMALL = replace(REFERENCE, layers=1, windows=(0,), hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96)


def test_the_reference_has_the_parameters_and_the_kv_of_the_plan() -> None:
    assert round(sum(math.prod(shape) for _, shape in REFERENCE.tensor_shapes()) / 1e9, 2) == 1.10
    assert REFERENCE.geometry.bytes_per_token == 24 * 1024


def test_a_model_reads_back_as_it_was_asked_for(demo_model: Path, tmp_path: Path) -> None:
    paths = [tmp_path / "one.gguf", tmp_path / "two.gguf"]
    for path in paths:
        write_random_model(path, demo_model, SMALL)
    with GGUFFile.open(paths[0]) as gguf:
        assert ModelConfig.from_gguf(gguf) == SMALL
    assert paths[0].read_bytes() == paths[1].read_bytes()
