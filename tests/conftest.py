"""Fixtures that several packages' tests share, and what the process must be like for all of them."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the command does; read when numpy is first imported
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # as loading a model does; some tests import ONNX Runtime first

# Jobs that a script starts in the background inherit the first ignored, and what nohup starts the second; tests send
# both, to themselves and to what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

COMPARISONS = (
    "npu/test_chat_families.py",
    "npu/test_convert_folder.py",
    "npu/test_families.py",
    "npu/test_gguf_tokenizer.py",
    "npu/test_huggingface.py",
    "npu/test_rope_oracle.py",
    "npu/test_same_tokens.py",
    "tools/test_models.py",
)
"""Tests against transformers, torch and sentencepiece: gigabytes that only `make oracle` installs."""

HAVE_ORACLE = all(find_spec(name) for name in ("torch", "transformers", "sentencepiece"))
collect_ignore = [] if HAVE_ORACLE else list(COMPARISONS)


def pytest_report_header() -> str | None:
    """Name what is left out."""
    return None if HAVE_ORACLE else f"left out, for want of transformers: {len(COMPARISONS)} files; see make oracle"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF, fetched as the demo fetches it. No skipping: without it the numbers are unproven."""
    from tools.demo_model import demo_model_path  # noqa: PLC0415 - imports numpy, which reads the environment above

    return demo_model_path(progress=False)
