"""What a process holds that runs the demo's model, against the weights' size in the file and against `rockpage plan`.

Every load happens in a process of its own. Memory is not noisy: two runs differ by less than a megabyte.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from npu.gguf import GGUFFile
from npu.memory_plan import CODE_BYTES
from tools.main import main

from .footprint import Footprint

ROOT = Path(__file__).parents[1]
MIB = 1 << 20

POOL_BYTES = 32 * 368_640
"""32 blocks of 30 layers * 2 * 3 heads * 16 tokens * 64 * 2 bytes: small, so that it hides nothing."""

OTHER_BYTES = 80 * MIB
"""What may stand beside the weights: tokenizer, sessions, buffers between graphs, arenas of allocators."""

Probe: TypeAlias = Callable[[str, str, str], dict[str, Footprint]]
"""Footprints by stage, of `(runtime, activations, cache)`; weights are repacked if the cache is cold, else found."""


@pytest.fixture(scope="module")
def probe(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Probe:
    cache_dir = tmp_path_factory.mktemp("cache")

    @functools.cache
    def run(runtime: str, activations: str, cache: str) -> dict[str, Footprint]:
        if cache == "warm":
            run("cpu", activations, "cold")  # the first with these activations; it leaves the weights behind
        arguments = [str(demo_model), runtime, activations, str(POOL_BYTES), str(cache_dir)]
        command = [sys.executable, "-m", "tests.memory_probe", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        stages: dict[str, Any] = json.loads(done.stdout)
        return {stage: Footprint(**values) for stage, values in stages.items()}

    return run


@pytest.fixture(scope="module")
def quantised_bytes(demo_model: Path) -> int:
    with GGUFFile.open(demo_model) as gguf:
        return sum(tensor.nbytes for tensor in gguf.tensors.values())


@pytest.mark.parametrize("cache", ["cold", "warm"])
@pytest.mark.parametrize("activations", ["int8", "fp32"])
def test_a_load_holds_little_more_than_the_weights(
    probe: Probe, quantised_bytes: int, activations: str, cache: str
) -> None:
    stages = probe("cpu", activations, cache)
    imported, loaded, stepped = stages["imported"], stages["loaded"], stages["stepped"]
    # Anonymous memory that came with the load, and what of the repacked weights has been touched. Pages of the model
    # file itself are the page cache's: how many are mapped depends on what else lies there.
    held = stepped.anonymous - imported.anonymous - POOL_BYTES + stepped.weights
    assert held > quantised_bytes  # less would mean that something was not counted
    assert held <= 1.25 * quantised_bytes + OTHER_BYTES
    # The peak counts the pool and pages of libraries, so it errs upwards.
    assert loaded.peak - imported.resident <= 1.5 * quantised_bytes + OTHER_BYTES
    # A load needs next to nothing beyond what it ends with, whatever the size of the model.
    assert loaded.peak - loaded.resident <= 8 * MIB
    # Tiles are read where they are mapped, and so are the scales that ONNX Runtime's kernels for float32 use.
    assert stages["generated"].weights > 0


@pytest.mark.parametrize("activations", ["int8", "fp32"])
@pytest.mark.parametrize("runtime", ["cpu", "emulated"])
def test_plan_is_within_a_tenth_of_what_is_measured(
    probe: Probe, demo_model: Path, capsys: pytest.CaptureFixture[str], runtime: str, activations: str
) -> None:
    options = ["--runtime", runtime, "--activations", activations, "--pool", str(POOL_BYTES), "--ram", "4GiB"]
    assert main(["plan", str(demo_model), "--json", *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["pool_bytes"] == POOL_BYTES
    assert answer["needed_bytes"] - answer["reserve_bytes"] == answer["process_bytes"]
    full = probe(runtime, activations, "warm")["generated"]
    # Of libraries and of the model file the kernel maps as much around a fault as lies in the page cache: 20 MiB more
    # just after they were written. So code counts as planned, and the embedding, which no plan counts, not.
    measured = full.anonymous + full.weights + CODE_BYTES
    assert answer["process_bytes"] == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("activations", ["int8", "fp32"])
def test_the_emulated_npu_takes_what_plan_says_of_it(
    probe: Probe, demo_model: Path, capsys: pytest.CaptureFixture[str], activations: str
) -> None:
    options = ["--runtime", "emulated", "--activations", activations, "--ram", "4GiB"]
    assert main(["plan", str(demo_model), "--json", *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    without, with_it = (probe(runtime, activations, "warm")["loaded"].anonymous for runtime in ("cpu", "emulated"))
    # Within less than one of the twelve buffers; allocators keep 4 MiB more or less from one process to the next.
    assert answer["staging_bytes"] + answer["device_bytes"] == pytest.approx(with_it - without, abs=5 * MIB)
