"""Runs commands as a user's shell would who never heard of the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["BIN", "ROOT", "run"]

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
"""Where the checkout's own environment has its commands."""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Standard output of a command that must succeed. No variable tells its Python where to look for modules."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=clean | environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    return done.stdout
