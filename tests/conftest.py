"""Fixtures that several packages' tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF; there is no skipping: without it the numbers of this project are unproven."""
    path = os.environ.get("ROCKPAGE_TEST_MODEL")
    if path is None:
        pytest.fail("set ROCKPAGE_TEST_MODEL to SmolLM2-135M-Instruct.Q4_1.gguf")
    return Path(path)
