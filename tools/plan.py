"""`rockpage plan`: what fits into a board's memory, from metadata alone."""

from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from .command import Subparsers, add_command
from .engine_options import add_model_option, model_path
from .units import format_mib, parse_size

if TYPE_CHECKING:
    from npu.memory_plan import MemoryPlan

__all__ = ["add_parser", "add_plan_options", "make_plan", "run"]

SESSION_TOKENS = (128, 512, 2048)
"""Lengths for which sessions are counted."""

LONGEST_COUNT = 9
"""Digits of a count: no model or context comes near, and arithmetic on it stays small."""

GEOMETRY_FIELDS = ["head_dim", "kv_heads", "layers"]

USUAL_GROUP = 8
"""Query heads per KV head if --geometry does not tell: the most among common Llama-type models (TinyLlama 1.1B)."""

EXAMPLE = """\
rockpage plan model.gguf --ram 4GiB --pool 256MiB
rockpage plan --geometry layers=24,kv_heads=2,head_dim=128 --weights 1.1GB --ram 4GiB"""


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage plan`."""
    parser = add_command(
        subparsers,
        "plan",
        run,
        summary="say what fits into a board's memory, by metadata alone; exit 1 if it does not",
        example=EXAMPLE,
    )
    add_model_option(parser)
    parser.add_argument("--ram", type=parse_size, metavar="SIZE", help="memory of the board (default: this machine's)")
    add_plan_options(parser)


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add what `make_plan` asks of the arguments, but for MODEL and --ram."""
    parser.add_argument(
        "--geometry", type=parse_geometry, metavar="layers=N,kv_heads=N,head_dim=N[,heads=N]", help="in place of MODEL"
    )
    parser.add_argument("--weights", type=parse_size, metavar="SIZE", help="bytes of the weights; goes with --geometry")
    parser.add_argument(
        "--reserve",
        type=parse_size,
        default="512MiB",
        metavar="SIZE",
        help="left to the kernel and other programs (default: %(default)s)",
    )
    parser.add_argument(
        "--pool", type=parse_size, default="192MiB", metavar="SIZE", help="the KV pool (default: %(default)s)"
    )
    parser.add_argument(
        "--runtime",
        choices=("auto", "cpu", "emulated"),
        default="auto",
        help="auto counts staging for an NPU, emulated also the copy that the emulated one keeps, cpu neither"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--activations",
        choices=("int8", "fp32"),
        default="int8",
        help="of the dense parts; weights are packed for them (default: %(default)s)",
    )
    parser.add_argument("--context", type=parse_count, metavar="TOKENS", help="what one session must be able to hold")


def parse_geometry(text: str) -> dict[str, int]:
    """Read `layers=24,kv_heads=2,head_dim=128`; `heads=12`, the query heads, may be among them.

    Raises:
        argparse.ArgumentTypeError: a field is missing, repeated, unknown, or not a positive integer.
    """
    fields = [part.partition("=")[::2] for part in text.split(",")]
    if sorted(name for name, _ in fields) not in (GEOMETRY_FIELDS, sorted([*GEOMETRY_FIELDS, "heads"])):
        raise argparse.ArgumentTypeError(f"'{text}' must give layers, kv_heads and head_dim (heads at will), each once")
    return {name: parse_count(value) for name, value in fields}


def parse_count(text: str) -> int:
    """Read a positive decimal integer.

    Raises:
        argparse.ArgumentTypeError: anything else.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= LONGEST_COUNT and int(text) > 0):
        raise argparse.ArgumentTypeError(f"'{text}' is not a positive integer")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Print the plan; 0 if it fits, 1 if not.

    Raises:
        UsageError: both MODEL and --geometry, or one of --geometry and --weights without the other.
        ModelError: the file is damaged or of a kind rockpage does not run.
    """
    plan = make_plan(args)
    obstacles = plan.obstacles()
    if args.json:
        print(json.dumps(_as_json(plan, obstacles)))
    else:
        print(_as_text(plan, obstacles))
    return 1 if obstacles else 0


def make_plan(args: argparse.Namespace) -> MemoryPlan:
    """What the arguments say is to run.

    Raises:
        UsageError: both MODEL and --geometry, or one of --geometry and --weights without the other.
        ModelError: the file is damaged or of a kind rockpage does not run.
    """
    from hostcache.errors import UsageError
    from hostcache.geometry import KVGeometry
    from npu.memory_plan import MemoryPlan, resident_weights, runtime_bytes
    from npu.model import ModelConfig
    from npu.source import open_model
    from npu.staged import arena_bytes
    from npu.weights import plan_weights

    if (args.geometry is None) != (args.weights is None) or (args.geometry is not None and args.model is not None):
        raise UsageError("plan takes either a MODEL, or --geometry together with --weights")
    if args.geometry is not None:
        fields = dict(args.geometry)
        heads, context_limit = fields.pop("heads", USUAL_GROUP * fields["kv_heads"]), None
        geometry = KVGeometry(**fields)
        weights, runtime = args.weights, runtime_bytes(geometry.layers)
    else:
        with open_model(model_path(args)) as source:
            config = ModelConfig.from_gguf(source)
            weights = resident_weights(plan_weights(source, config, args.activations), args.activations)
        geometry, heads, context_limit = config.geometry, config.heads, config.context_length
        runtime = runtime_bytes(config.layers, config.vocab)
    staging = 0 if args.runtime == "cpu" else arena_bytes(geometry, heads)
    return MemoryPlan(
        geometry=geometry,
        ram_bytes=args.ram or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        reserve_bytes=args.reserve,
        weights_bytes=weights,
        runtime_bytes=runtime,
        staging_bytes=staging,
        device_bytes=staging if args.runtime == "emulated" else 0,
        pool_asked=args.pool,
        context=args.context,
        context_limit=context_limit,
    )


def _as_json(plan: MemoryPlan, obstacles: list[str]) -> dict[str, object]:
    return {
        "fits": not obstacles,
        "obstacles": obstacles,
        "ram_bytes": plan.ram_bytes,
        "reserve_bytes": plan.reserve_bytes,
        "weights_bytes": plan.weights_bytes,
        "runtime_bytes": plan.runtime_bytes,
        "staging_bytes": plan.staging_bytes,
        "device_bytes": plan.device_bytes,
        "pool_bytes": plan.pool_bytes,
        "pool_blocks": plan.pool_blocks,
        "pool_limit_bytes": plan.pool_limit_bytes,
        "process_bytes": plan.process_bytes,
        "needed_bytes": plan.needed_bytes,
        "bytes_per_token": plan.geometry.bytes_per_token,
        "block_bytes": plan.geometry.block_bytes,
        "sessions": {
            str(tokens): {"paged": plan.sessions(tokens), "preallocated": plan.preallocated_sessions(tokens)}
            for tokens in SESSION_TOKENS
        },
    }


def _as_text(plan: MemoryPlan, obstacles: list[str]) -> str:
    geometry = plan.geometry
    sizes = [
        ("weights", plan.weights_bytes),
        ("runtime", plan.runtime_bytes),
        ("staging", plan.staging_bytes),
        *([("the emulated NPU's copy", plan.device_bytes)] if plan.device_bytes else []),
        (f"KV pool, {plan.pool_blocks} blocks", plan.pool_bytes),
        ("the process", plan.process_bytes),
        ("left to the system", plan.reserve_bytes),
        ("needed", plan.needed_bytes),
        ("RAM", plan.ram_bytes),
        ("largest pool that fits", plan.pool_limit_bytes),
    ]
    lines = [
        f"{geometry.layers} layers, {geometry.kv_heads} KV heads of {geometry.head_dim}, fp16: "
        f"{geometry.bytes_per_token / 2**10:.1f} KiB a token, {geometry.block_bytes / 2**10:.1f} KiB a block",
        "",
        *(f"{name:<24}{format_mib(size):>16}" for name, size in sizes),
        "",
        f"{'sessions at once':<24}{'paged':>8}{'preallocated':>16}",
        *(
            f"{f'of {tokens} tokens':<24}{plan.sessions(tokens):>8}{plan.preallocated_sessions(tokens):>16}"
            for tokens in SESSION_TOKENS
        ),
        "",
        "it fits" if not obstacles else "it does not fit",
        *(f"- {obstacle}" for obstacle in obstacles),
    ]
    return "\n".join(lines)
