"""The process that tests run in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_numpy_is_imported_behind_the_environment_that_it_reads() -> None:
    """Else OpenBLAS has threads that spin, and the emulated NPU's steps take several times as long."""
    program = "import sys, tests.conftest; sys.exit('numpy' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], check=False)
    assert ended.returncode == 0
