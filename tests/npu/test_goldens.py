"""The demo model against llama.cpp and against an exact float32 pass, with a plain contiguous cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from npu.decoder import Decoder
from npu.gguf import GGUFFile
from npu.weights import Activations
from tests.npu.reference import PlainSession, log_softmax

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "llama_cpp_smollm2.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=["fp32", "int8"])
def decoder(demo_model: Path, cache_dir: Path, request: pytest.FixtureRequest) -> Decoder:
    activations: Activations = request.param
    with GGUFFile.open(demo_model) as opened:
        return Decoder.load(opened, activations=activations, cache_dir=cache_dir)


def next_logprobs(logits: NDArray[np.float32], ids: list[int]) -> NDArray[np.float64]:
    """Log-probability of each next token, all but the first."""
    out: NDArray[np.float64] = log_softmax(logits[:-1])[np.arange(len(ids) - 1), ids[1:]]
    return out


@pytest.mark.parametrize("golden", GOLDENS["scored"], ids=["first text", "second text"])
def test_scores_follow_the_float32_pass(decoder: Decoder, golden: dict[str, Any]) -> None:
    exact = np.array(golden["logprob_of_next_fp32"])
    if "fp32" in decoder.numerics:
        logprobs = next_logprobs(PlainSession(decoder).step(golden["ids"]), golden["ids"])
        # The same float32 products summed in another order; 9e-6 was seen.
        assert np.abs(logprobs - exact).mean() < 1e-4
        assert np.exp(-logprobs.mean()) == pytest.approx(golden["perplexity_fp32"], rel=1e-4)
        return
    # A change of 1e-6 anywhere tips roundings to int8 and moves the perplexity of so short a text by 0.6 % (standard
    # deviation), so that one run is a draw; the mean of four such draws is judged.
    rng = np.random.default_rng(0)
    runs = [PlainSession(decoder, jitter=rng).step(golden["ids"]) for _ in range(4)]
    logprobs = np.stack([next_logprobs(logits, golden["ids"]) for logits in runs])
    # llama.cpp quantises its activations as well: its own distance to the float32 pass is the measure.
    of_llama_cpp = np.abs(np.array(golden["logprob_of_next"]) - exact).mean()
    assert np.abs(logprobs - exact).mean() <= 1.15 * of_llama_cpp
    assert np.exp(-logprobs.mean(1)).mean() == pytest.approx(golden["perplexity_fp32"], rel=0.015)


@pytest.mark.parametrize("golden", GOLDENS["greedy"], ids=range(len(GOLDENS["greedy"])))
def test_greedy_choices_are_those_of_llama_cpp_where_it_is_sure(decoder: Decoder, golden: dict[str, Any]) -> None:
    prompt, output, gaps = golden["prompt_ids"], golden["output_ids"], np.array(golden["logit_gap_top1_top2"])
    ids = prompt + output[:-1]
    chosen = PlainSession(decoder).step(ids, rows=list(range(len(prompt) - 1, len(ids)))).argmax(-1)
    sure = gaps > 0.5
    assert sure.sum() > 8
    np.testing.assert_array_equal(chosen[sure], np.array(output)[sure])


def test_rows_of_the_demo_model_do_not_depend_on_how_they_are_grouped(decoder: Decoder) -> None:
    ids = GOLDENS["scored"][0]["ids"][:48]
    whole, cut = PlainSession(decoder), PlainSession(decoder)
    expected = whole.step(ids)
    logits = np.concatenate([cut.step(ids[a:b]) for a, b in ((0, 1), (1, 8), (8, 9), (9, 25), (25, 48))])
    if "int8" in decoder.numerics:
        np.testing.assert_array_equal(cut.k, whole.k)
        np.testing.assert_array_equal(cut.v, whole.v)
        np.testing.assert_array_equal(logits, expected)
    else:
        assert np.abs(cut.k - whole.k).max() < 1e-4 * np.abs(whole.k).max()
        assert np.abs(logits - expected).max() < 1e-3


@pytest.mark.parametrize("activations", ["int8", "fp32"])
def test_loading_takes_little_more_memory_than_the_weights(
    demo_model: Path, cache_dir: Path, tmp_path: Path, activations: Activations
) -> None:
    """Both with a cold cache, whose file is written first, and with a warm one."""
    quantised = demo_model.stat().st_size
    allowance = 80 << 20
    for cache in (tmp_path, cache_dir):
        command = [sys.executable, "-c", _MEASURE_LOAD, str(demo_model), str(cache), activations]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        after, peak = json.loads(done.stdout)
        assert after <= 1.25 * quantised + allowance, f"{after / 2**20:.0f} MiB after load"
        assert peak <= 1.5 * quantised + allowance, f"{peak / 2**20:.0f} MiB while loading"


# Prints what loading adds: [anonymous and private bytes, peak resident bytes].
_MEASURE_LOAD = """
import json, sys
from pathlib import Path
import numpy, onnx, onnxruntime  # libraries are not weights
from npu.decoder import Decoder
from npu.gguf import GGUFFile

def field(path, names):
    lines = Path(path).read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.split(":")[0] in names)

def private():
    return field("/proc/self/smaps_rollup", ["Private_Clean", "Private_Dirty"])  # anonymous memory is among it

before, peak_before = private(), field("/proc/self/status", ["VmRSS"])
with GGUFFile.open(sys.argv[1]) as gguf:
    decoder = Decoder.load(gguf, activations=sys.argv[3], cache_dir=Path(sys.argv[2]))
print(json.dumps([private() - before, field("/proc/self/status", ["VmHWM"]) - peak_before]))
"""
