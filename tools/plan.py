"""`rockpage plan`: what fits into a board's memory, from metadata alone."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import TYPE_CHECKING

from npu.sizes import format_size

from .command import Subparsers, add_command
from .engine_options import add_model_option, model_path
from .units import parse_size

if TYPE_CHECKING:
    from npu.memory_plan import MemoryPlan

__all__ = ["add_parser", "add_plan_options", "make_plan", "run"]

DEFAULT_RESERVE = 512 << 20
"""Bytes of a machine's memory that are left to the kernel and other programs."""

SESSION_TOKENS = (128, 512, 2048)
"""Lengths for which sessions are counted."""

LONGEST_COUNT = 9
"""Digits of a count: no model or context comes near, and arithmetic on it stays small."""

GEOMETRY_FIELDS = ["head_dim", "kv_heads", "layers"]

USUAL_GROUP = 8
"""Query heads per KV head if --geometry does not tell: the most among common Llama-type models (TinyLlama 1.1B)."""

USUAL_EXPANSION = 6
"""Width of the MLP over that of the heads if only --geometry is given: the most among them (Qwen2.5 1.5B, 5.8)."""

EXAMPLE = """\
rockpage plan model.gguf --ram 4GiB --pool 256MiB
rockpage plan --geometry layers=24,kv_heads=2,head_dim=128 --weights 1.1GB"""


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage plan`."""
    parser = add_command(
        subparsers,
        "plan",
        run,
        summary="say what fits into a board's memory; exit 1 if it does not",
        usage="[OPTIONS] [MODEL]",
        example=EXAMPLE,
    )
    add_model_option(parser)
    parser.add_argument(
        "--ram", type=parse_size, metavar="SIZE", help="memory of the board (default: this machine's, or its cgroup's)"
    )
    add_plan_options(parser)


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add what `make_plan` asks of the arguments, but for MODEL and --ram."""
    parser.add_argument(
        "--geometry",
        type=parse_geometry,
        metavar="FIELDS",
        help="in place of MODEL: layers=N,kv_heads=N,head_dim=N and, at will, heads=N",
    )
    parser.add_argument("--weights", type=parse_size, metavar="SIZE", help="bytes of the weights; goes with --geometry")
    parser.add_argument(
        "--reserve",
        type=parse_size,
        metavar="SIZE",
        help="left to the system (default: 512MiB of a machine, nothing of a cgroup)",
    )
    parser.add_argument(
        "--pool", type=parse_size, default="192MiB", metavar="SIZE", help="the KV pool (default: %(default)s)"
    )
    parser.add_argument(
        "--runtime",
        choices=("auto", "cpu", "emulated"),
        default="auto",
        metavar="NAME",
        help="auto: with staging for an NPU; emulated: and that NPU's own memory; cpu: neither (default: %(default)s)",
    )
    parser.add_argument(
        "--resident",
        type=parse_size,
        default=0,
        metavar="SIZE",
        help="memory in which decoding sequences stay staged (default: none)",
    )
    parser.add_argument(
        "--activations",
        choices=("int8", "fp32"),
        default="int8",
        metavar="TYPE",
        help="int8 or fp32: weights are packed for it (default: %(default)s)",
    )
    parser.add_argument("--context", type=parse_count, metavar="TOKENS", help="what one session must be able to hold")
    parser.add_argument(
        "--sessions", type=parse_count, metavar="N", help="of --context tokens each, that must fit at once"
    )
    parser.add_argument(
        "--kv",
        choices=("fp16", "int8", "int4"),
        metavar="CODEC",
        help="fp16, int8 or int4 (default: the richest with which they fit)",
    )


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
        UsageError: both MODEL and --geometry, one of --geometry and --weights without the other, --sessions without
            --context, or a geometry that no runtime computes.
        ModelError: the file is damaged or of a kind rockpage does not run.
    """
    plan = make_plan(args)
    obstacles = plan.obstacles()
    if args.json:
        print(json.dumps(_as_json(plan, obstacles)))
    else:
        print(_as_text(plan, obstacles, chosen=args.kv is None))
    return 1 if obstacles else 0


def make_plan(args: argparse.Namespace) -> MemoryPlan:
    """What the arguments say is to run, with the codec that they name, or else the richest with which it fits.

    Raises:
        UsageError: both MODEL and --geometry, one of --geometry and --weights without the other, --sessions without
            --context, or --resident without staging.
        ModelError: the file is damaged or of a kind rockpage does not run.
    """
    from hostcache.codec import codec_named
    from npu.memory_plan import richest_plan

    plan = replace(_plan_in_fp16(args), sessions_asked=args.sessions)
    if args.kv is None:
        return richest_plan(plan)
    return replace(plan, codec=codec_named(args.kv))


def _plan_in_fp16(args: argparse.Namespace) -> MemoryPlan:
    """What the arguments say is to run, with sessions in fp16.

    Raises:
        UsageError: both MODEL and --geometry, one of --geometry and --weights without the other, --sessions without
            --context, or --resident without staging.
        ModelError: the file is damaged or of a kind rockpage does not run.
    """
    from hostcache.errors import UsageError
    from hostcache.geometry import KVGeometry
    from hostcache.scheduler_config import SchedulerConfig
    from npu.memory_plan import runtime_bytes, step_bytes
    from npu.model_memory import plan_geometry, plan_model
    from npu.source import open_model

    if args.sessions is not None and args.context is None:
        raise UsageError("--sessions needs --context, the tokens that each must be able to hold")
    if (args.geometry is None) != (args.weights is None) or (args.geometry is not None and args.model is not None):
        raise UsageError("plan takes either a MODEL, or --geometry together with --weights")
    ram, reserve = _memory(args)
    if args.geometry is None:
        with open_model(model_path(args)) as source:
            return plan_model(
                source,
                args.activations,
                runtime=args.runtime,
                pool_asked=args.pool,
                ram_bytes=ram,
                reserve_bytes=reserve,
                resident_bytes=args.resident,
                context=args.context,
            )
    fields = dict(args.geometry)
    heads = fields.pop("heads", USUAL_GROUP * fields["kv_heads"])
    geometry = KVGeometry(**fields)
    hidden = heads * geometry.head_dim
    return plan_geometry(
        geometry,
        heads,
        weights_bytes=args.weights,
        runtime_bytes=runtime_bytes(geometry.layers)
        + step_bytes(hidden, USUAL_EXPANSION * hidden, SchedulerConfig.max_rows),
        runtime=args.runtime,
        pool_asked=args.pool,
        ram_bytes=ram,
        reserve_bytes=reserve,
        resident_bytes=args.resident,
        context=args.context,
    )


def _memory(args: argparse.Namespace) -> tuple[int, int]:
    """Bytes to plan with, and what of them is left to the system."""
    from hostcache.errors import UsageError
    from hostcache.memory_budget import memory_budgets

    if args.ram is not None:
        return args.ram, args.reserve or DEFAULT_RESERVE
    # The kernel and other programs live in the machine's memory; what a cgroup may have is its own.
    pairs = [
        (budget.limit, args.reserve or (DEFAULT_RESERVE if budget.cgroup is None else 0)) for budget in memory_budgets()
    ]
    if not pairs:
        raise UsageError("the kernel does not say how much memory there is: give --ram")
    return min(pairs, key=lambda pair: pair[0] - pair[1])


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
        "kv": plan.codec.name,
        "bytes_per_token": plan.block_bytes // plan.geometry.block_tokens,
        "block_bytes": plan.block_bytes,
        "sessions": {
            str(tokens): {"paged": plan.sessions(tokens), "preallocated": plan.preallocated_sessions(tokens)}
            for tokens in SESSION_TOKENS
        },
    }


def _choice(plan: MemoryPlan) -> list[str]:
    """Why the codec is what it is, if nobody named one; nothing is said where no length was asked for."""
    if plan.context is None:
        return []
    count, tokens, codec = plan.sessions_asked or 1, plan.context, plan.codec.name
    wanted = f"{count} sessions of {tokens} tokens fit" if count > 1 else f"a session of {tokens} tokens fits"
    if plan.sessions(tokens) < count:
        return [f"there is no KV in which {wanted}; in {codec}:"]
    return [f"{codec} is the richest KV in which {wanted}: --kv {codec}"]


def _as_text(plan: MemoryPlan, obstacles: list[str], *, chosen: bool) -> str:
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
        f"{geometry.layers} layers, {geometry.kv_heads} KV heads of {geometry.head_dim}, {plan.codec.name}: "
        f"{plan.block_bytes / geometry.block_tokens / 2**10:.1f} KiB a token, "
        f"{plan.block_bytes / 2**10:.1f} KiB a block",
        *(_choice(plan) if chosen else []),
        "",
        *(f"{name:<24}{format_size(size):>16}" for name, size in sizes),
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
