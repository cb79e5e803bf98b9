"""Loads a model as a service would and tells what it holds on the way: JSON, one footprint by stage.

Run it in a process of its own: `python -m tests.memory_probe MODEL RUNTIME ACTIVATIONS POOL_BYTES CACHE_DIR`.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import cast

from npu.engine import Engine
from npu.sampler import SamplingParams
from npu.weights import Activations

from .footprint import Footprint

LICENSE = Path(__file__).parents[1] / "LICENSE"

PROMPT_CHARACTERS = 400
"""More tokens of plain English than a chunk has; four of them make full steps."""


def main(model: str, runtime: str, activations: str, pool_bytes: str, cache_dir: str) -> None:
    for name in ("onnx", "onnxruntime", "tokenizers", "jinja2"):  # all that a load would import
        import_module(name)
    stages = {"imported": Footprint.of_this_process()}
    engine = Engine.load(
        model,
        runtime=runtime,
        activations=cast(Activations, activations),
        pool_bytes=int(pool_bytes),
        cache_dir=Path(cache_dir),
    )
    stages["loaded"] = Footprint.of_this_process()
    text = LICENSE.read_text(encoding="utf-8")
    parts = [text[PROMPT_CHARACTERS * part :][:PROMPT_CHARACTERS] for part in range(4)]
    for stage, prompts, tokens in (("stepped", ["Hello"], 1), ("generated", parts, 8)):
        for prompt in prompts:
            engine.add_request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True))
        while not engine.idle:
            engine.step()
        stages[stage] = Footprint.of_this_process()
    engine.close()
    json.dump({stage: footprint.as_dict() for stage, footprint in stages.items()}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
