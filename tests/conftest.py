"""Fixtures that several packages' tests share, and what the process must be like for all of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tools.demo_model import demo_model_path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command does; read when numpy is first imported
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as loading a model does; some tests import ONNX Runtime first

# Jobs that a script starts in the background inherit it ignored; tests send it, to themselves and to what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF, fetched as the demo fetches it. No skipping: without it the numbers are unproven."""
    return demo_model_path(progress=False)
