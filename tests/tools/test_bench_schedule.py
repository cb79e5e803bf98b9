"""The benchmark of planning runs, by itself and against a peer of nano-vllm's shape."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.bench_schedule import main, measure, own_step, peer_step

SEQUENCE = """
class Sequence:
    block_size = 256
    def __init__(self, token_ids, sampling_params):
        assert sampling_params.ignore_eos
        self.tokens, self.left, self.prepared = list(token_ids), sampling_params.max_tokens, False
"""

SCHEDULER = """
class Scheduler:
    def __init__(self, config):
        self.config, self.sequences = config, []
    def add(self, sequence):
        self.sequences.append(sequence)
    def schedule(self):
        return [sequence for sequence in self.sequences if sequence.left], False
    def postprocess(self, sequences, tokens, is_prefill):
        assert all(sequence.prepared for sequence in sequences) or len(self.sequences[0].tokens) == 64
        assert len(sequences) == len(tokens) == self.config.max_num_seqs
        for sequence, token in zip(sequences, tokens):
            sequence.tokens.append(token)
            sequence.left -= 1
            sequence.prepared = False
"""

MODEL_RUNNER = """
import a_model_that_is_not_there
class ModelRunner:
    def __init__(self, model: Model):
        raise NotImplementedError
    def prepare_block_tables(self, seqs: list[Sequence]):
        return torch.tensor([[1, 2] for _ in seqs], dtype=torch.int32, pin_memory=True).cuda(non_blocking=True)
    def prepare_decode(self, seqs: list[Sequence]):
        assert self.block_size == 4 or len(seqs) in (1, 8, 32, 128)
        set_context(False, block_tables=self.prepare_block_tables(seqs))
        for sequence in seqs:
            sequence.prepared = True
        return torch.tensor([sequence.tokens[-1] for sequence in seqs], dtype=torch.int64, pin_memory=True)
"""

SAMPLING = """
from dataclasses import dataclass
@dataclass
class SamplingParams:
    max_tokens: int
    ignore_eos: bool
"""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Path]:
    """A checkout with what the benchmark calls."""
    engine = tmp_path / "nanovllm" / "engine"
    engine.mkdir(parents=True)
    (tmp_path / "nanovllm" / "sampling_params.py").write_text(SAMPLING)
    (engine / "__init__.py").touch()
    (engine / "sequence.py").write_text(SEQUENCE)
    (engine / "scheduler.py").write_text(SCHEDULER)
    (engine / "model_runner.py").write_text(MODEL_RUNNER)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "nanovllm"]:
        del sys.modules[name]


def test_every_sequence_gets_a_token_in_every_step() -> None:
    step = own_step(sequences=5, steps=40, block_tokens=4)
    seconds = [step() for _ in range(40)]
    assert all(second > 0 for second in seconds)
    with pytest.raises(ValueError, match="0 tokens expected, got 5"):  # all have ended: the plan is empty
        step()


def test_a_peer_plans_the_same_steps(peer: Path) -> None:
    step = peer_step(peer, sequences=3, steps=10, block_tokens=4)
    own, other = measure([own_step(3, 10, 4), step], rounds=10)
    assert own > 0
    assert other > 0
    with pytest.raises(AssertionError):  # all have had their tokens
        step()


@pytest.mark.parametrize("compared", [False, True])
def test_every_number_of_sequences_gets_a_line(
    capsys: pytest.CaptureFixture[str], peer: Path, *, compared: bool
) -> None:
    assert main(["--steps", "3", *(["--peer", str(peer)] if compared else [])]) == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split() == ["sequences", "step", *(["peer", "ratio"] if compared else [])]
    tail = r" +\d+ us +[\d.]+" if compared else ""
    for line, sequences in zip(lines, (1, 8, 32, 128), strict=True):
        assert re.fullmatch(rf" *{sequences} +\d+ us{tail}", line)


def test_no_checkout_is_an_import_error(tmp_path: Path) -> None:
    with pytest.raises(ImportError):
        peer_step(tmp_path, 1, 1, 4)
