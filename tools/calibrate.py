"""`rockpage calibrate`: measure what attention costs on this machine's NPU and CPU, and keep it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from datetime import date
from typing import TYPE_CHECKING

from .command import Subparsers, add_command
from .engine_options import add_model_option, add_threads_option, model_path

if TYPE_CHECKING:
    from pathlib import Path

    from hostcache.geometry import KVGeometry
    from npu.cost_model import CostModel

__all__ = ["add_parser", "run"]

EXAMPLE = """\
rockpage calibrate model.gguf --graphs model-npu
rockpage run model.gguf --graphs model-npu --chat --prompt "Hi\""""


def add_parser(subparsers: Subparsers) -> None:
    """Register `rockpage calibrate`."""
    parser = add_command(
        subparsers,
        "calibrate",
        run,
        summary="measure what attention costs on the NPU and the CPU",
        example=EXAMPLE,
    )
    add_model_option(parser)
    parser.add_argument(
        "--runtime",
        choices=("rknnlite", "rknnrt", "emulated"),
        default="rknnlite",
        help="what to measure beside the CPU; measuring the emulated NPU only shows that it works"
        " (default: %(default)s)",
    )
    parser.add_argument("--graphs", metavar="DIR", help="from rockpage export attention, for a board's NPU")
    add_threads_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print the figures and where they are kept, or one JSON object with the fields of the model and `file`; 0.

    Raises:
        RockpageError: the model or the graphs cannot be used, a launch failed, or the machine was too busy.
        OSError: the cache's folder cannot be written.
    """
    from npu.model import ModelConfig
    from npu.source import open_model

    with open_model(model_path(args)) as source:
        config = ModelConfig.from_gguf(source)
    model, path = _calibrate(args, config.geometry, config.heads)
    if args.json:
        print(json.dumps({**asdict(model), "file": str(path)}))
        return 0
    print(
        f"a launch             {model.launch_seconds * 1e3:.3f} ms, on each of {model.cores} cores\n"
        f"gathering            {model.gather_bytes_per_second / 1e9:.2f} GB/s\n"
        f"the NPU's reading    {model.device_bytes_per_second / 1e9:.2f} GB/s a core\n"
        f"its arithmetic       {model.device_multiply_adds_per_second / 1e9:.1f} G multiply-adds/s a core\n"
        f"the CPU's reading    {model.host_bytes_per_second / 1e9:.2f} GB/s on {args.threads} threads\n"
        f"its arithmetic       {model.host_multiply_adds_per_second / 1e9:.1f} G multiply-adds/s\n"
        f"kept in              {path}"
    )
    return 0


def _calibrate(args: argparse.Namespace, geometry: KVGeometry, heads: int) -> tuple[CostModel, Path]:
    """Measure, fit and save; with the file."""
    from contextlib import closing
    from pathlib import Path

    from npu.calibration import CalibrationKey, save_cost_model
    from npu.cost_fit import fit
    from npu.cost_measure import measure, scratch_cache
    from npu.cpu import CpuAttention
    from npu.runtimes import open_runtime
    from npu.staged import StagedAttention
    from npu.weights_cache import default_cache_dir
    from staging import DEFAULT_BUCKETS

    folder = default_cache_dir()
    graphs = None if args.graphs is None else Path(args.graphs)
    with (
        closing(scratch_cache(geometry, DEFAULT_BUCKETS[-1])) as cache,
        closing(open_runtime(args.runtime, cache, heads, threads=args.threads, graphs=graphs)) as staged,
        closing(CpuAttention(cache, heads, args.threads)) as host,
    ):
        assert isinstance(staged, StagedAttention)  # as both choices are
        timings = measure(staged, host, cache, heads)
        model = fit(timings, staged.cores.count, f"measured on this machine on {date.today()}")
        key = CalibrationKey.here(staged.numerics, geometry, heads, args.threads)
    return model, save_cost_model(key, model, folder)
