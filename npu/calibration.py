"""Where a machine's cost model is kept: one small JSON file for each machine, runtime and model geometry.

::

    $XDG_CACHE_HOME/rockpage/calibration/<digest of the key>.json

It decides where attention runs, never what comes out. So a file that cannot be used is named in the log and left out:
then the published figures serve.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hostcache.geometry import KVGeometry
from hostcache.whole_file import replace_file

from .cost_model import PUBLISHED, CostModel
from .json_data import from_json
from .machine import Machine
from .weights_cache import make_private

__all__ = ["CalibrationKey", "describe_machine", "load_cost_model", "save_cost_model"]

_FORMAT = 1
_LARGEST = 1 << 16
"""Bytes; a file has some hundred."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CalibrationKey:
    """What figures hold for.

    Attributes:
        machine: see `describe_machine`.
        runtime: numerics of the staged runtime: its device, the versions of graphs and libraries, the host's kernel.
        threads: of the host's kernel.
        kv_heads: of the model; likewise the others.
        heads: query heads.
        head_dim: elements per head.
    """

    machine: str
    runtime: str
    threads: int
    kv_heads: int
    heads: int
    head_dim: int

    @classmethod
    def here(cls, runtime: str, geometry: KVGeometry, heads: int, threads: int) -> CalibrationKey:
        """For this machine, and a model with so many query heads."""
        return cls(describe_machine(), runtime, threads, geometry.kv_heads, heads, geometry.head_dim)

    def path(self, cache_dir: Path) -> Path:
        """The file in a cache folder."""
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return cache_dir / "calibration" / f"{digest[:32]}.json"


@dataclass(frozen=True)
class _Calibration:
    """What a file holds."""

    format: int
    key: CalibrationKey
    model: CostModel


def describe_machine(machine: Machine | None = None) -> str:
    """The board, if it says which, the architecture, and its CPUs. Names no host and no user.

    Args:
        machine: this one by default.
    """
    machine = machine or Machine()
    kinds: Counter[str] = Counter()
    for processor in (machine.text("/proc/cpuinfo") or "").split("\n\n"):
        fields = dict(line.split(":", 1) for line in processor.splitlines() if ":" in line)
        stripped = {name.strip(): value.strip() for name, value in fields.items()}
        if "processor" in stripped:
            arm = "/".join(stripped[name] for name in ("CPU implementer", "CPU part") if name in stripped)
            kinds[stripped.get("model name") or arm] += 1
    cpus = [f"{count} x {kind}" for kind, count in sorted(kinds.items())]
    return ", ".join([*machine.strings("/proc/device-tree/model")[:1], platform.machine(), *cpus])


def save_cost_model(key: CalibrationKey, model: CostModel, cache_dir: Path) -> Path:
    """Keep a measured model, in place of an older one.

    Returns:
        The file.

    Raises:
        OSError: the folder cannot be written.
    """
    path = key.path(cache_dir)
    make_private(path.parent)
    replace_file(path, json.dumps(asdict(_Calibration(_FORMAT, key, model)), indent=1).encode())
    return path


def load_cost_model(key: CalibrationKey, cache_dir: Path, cores: int) -> CostModel:
    """The model that was measured for `key`, or the published one if there is none that can be used.

    Args:
        key: what it must hold for.
        cache_dir: where it may be.
        cores: of the device, of which the published model knows nothing.
    """
    published = replace(PUBLISHED, cores=cores)
    path = key.path(cache_dir)
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")
        with path.open("rb") as file:
            content = file.read(_LARGEST)
        calibration = from_json(_Calibration, json.loads(content))
        if calibration.format != _FORMAT:
            raise ValueError(f"it has format {calibration.format}, not {_FORMAT}")
        if calibration.key != key:
            raise ValueError(f"it is for {calibration.key}, not for {key}")
    except FileNotFoundError:
        return published
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("%s cannot be used (%s): run rockpage calibrate again, or remove it", path, error)
        return published
    return calibration.model
