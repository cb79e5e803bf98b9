"""Fixtures that several packages' tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.demo_model import demo_model_path


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's GGUF, fetched as the demo fetches it. No skipping: without it the numbers are unproven."""
    return demo_model_path(progress=False)
