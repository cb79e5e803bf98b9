"""`rockpage models`: which models run, from the tables that the readers go by."""

from __future__ import annotations

import argparse
import json

from .command import Subparsers, add_command

__all__ = ["add_parser", "run"]

EXAMPLE = """\
rockpage models
rockpage models --json"""


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage models`."""
    add_command(subparsers, "models", run, summary="list the kinds of models that run", example=EXAMPLE)


def run(args: argparse.Namespace) -> int:
    """Print the families with what sets them apart, and the types of weights, rotations and tokenizers; 0."""
    from npu.architectures import ARCHITECTURES
    from npu.bpe import PRE_TOKENIZERS
    from npu.ggml import RUNNABLE_TYPES
    from npu.huggingface_config import ROPE_TYPES
    from npu.rope import RopeScaling
    from npu.safetensors_file import SAFETENSORS_TYPES

    families = [
        {
            "name": family.name,
            "models": list(family.models),
            "qkv_bias": family.qkv_bias,
            "qk_norm": family.qk_norm,
        }
        for family in ARCHITECTURES.values()
    ]
    gguf = {
        "weights": [kind.name for kind in RUNNABLE_TYPES],
        "rope_scaling": [*(kind.value for kind in RopeScaling), "rope_freqs.weight"],
        "pre_tokenizers": sorted(PRE_TOKENIZERS),
    }
    folder = {"weights": list(SAFETENSORS_TYPES), "rope_scaling": list(ROPE_TYPES)}
    if args.json:
        print(json.dumps({"architectures": families, "gguf": gguf, "huggingface": folder}))
        return 0
    print(f"{'architecture':<14}{'QKV bias':<10}{'QK norm':<10}models")
    for family in ARCHITECTURES.values():
        features = f"{_yes(family.qkv_bias):<10}{_yes(family.qk_norm):<10}"
        print(f"{family.name:<14}{features}{', '.join(family.models)}")
    for title, lists in (("a GGUF file", gguf), ("a Hugging Face folder with safetensors", folder)):
        print(f"\n{title}")
        for what, names in lists.items():
            print(f"  {what.replace('_', ' '):<16}{', '.join(names)}")
    return 0


def _yes(value: bool) -> str:
    return "yes" if value else "no"
