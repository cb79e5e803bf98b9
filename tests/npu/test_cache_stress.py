"""Processes that fill, empty and use one small cache at once, and are killed in the middle of it."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from npu.gguf import GGUFFile
from npu.model import ModelConfig
from npu.weights import WeightsPlan, plan_weights
from npu.weights_cache import weights_folder, weights_room
from tests.npu.tiny import write_tiny_llama

CHECKOUT = Path(__file__).parents[2]
WORKERS = 4
KILLED = 25
KEPT = 3
"""Files that the cache's limit allows, fewer than there are workers."""


def work(model: Path, root: Path, seed: int) -> None:
    """Load one of eight models after the other, and see that its weights are whole for as long as they are used."""
    randomly = random.Random(seed)
    with GGUFFile.open(model) as source:
        plan = plan_weights(source, ModelConfig.from_gguf(source), "int8")
        os.environ["ROCKPAGE_CACHE_SIZE"] = str(KEPT * file_bytes(plan))
        while True:
            digest = randomly.choice("01234567") * 64
            with weights_folder(source, plan, digest, "int8", root) as folder:
                if not folder.is_relative_to(root):
                    sys.exit(f"the cache refused: {folder}")
                for _ in range(2):
                    content = (folder / "weights.bin").read_bytes()
                    if hashlib.sha256(content[: plan.nbytes]).digest() != content[plan.nbytes :]:
                        sys.exit(f"{folder} is not whole")
                    time.sleep(randomly.random() / 100)
            if randomly.random() < 0.02:
                weights_room(root).clear()


def file_bytes(plan: WeightsPlan) -> int:
    return plan.nbytes + hashlib.sha256().digest_size


@pytest.mark.long
def test_killed_processes_spoil_nothing_for_the_others(tmp_path: Path) -> None:
    model, root, randomly = write_tiny_llama(tmp_path / "tiny.gguf"), tmp_path / "cache", random.Random(0)
    command = [sys.executable, "-m", "tests.npu.test_cache_stress", str(model), str(root)]

    def start(seed: int) -> subprocess.Popen[str]:
        return subprocess.Popen([*command, str(seed)], cwd=CHECKOUT, stderr=subprocess.PIPE, text=True)

    workers = [start(seed) for seed in range(WORKERS)]
    complaints = []
    try:
        for seed in range(WORKERS, WORKERS + KILLED):
            time.sleep(0.7)
            oldest = workers.pop(0) if randomly.random() < 0.8 else workers.pop()
            oldest.kill()
            complaints.append(oldest.communicate()[1])
            workers.append(start(seed))
        time.sleep(1)
    finally:
        for worker in workers:
            worker.kill()
            complaints.append(worker.communicate()[1])
    assert set(complaints) == {""}
    with GGUFFile.open(model) as source:
        plan = plan_weights(source, ModelConfig.from_gguf(source), "int8")
    entries = weights_room(root).entries()
    assert len(entries) >= 1  # they did get that far
    assert sum(entry.nbytes for entry in entries) <= (WORKERS + 1) * file_bytes(plan)  # what was in use, and one more
    assert not any(entry.in_use for entry in entries)
    weights_room(root).clear()
    assert os.listdir(root / "weights") == ["lock"]


if __name__ == "__main__":
    work(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
