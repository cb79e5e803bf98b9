"""A checkout with as much of nano-vllm as the benchmarks call, and which minds how it is called."""

from __future__ import annotations

from pathlib import Path

__all__ = ["check_out"]

SEQUENCE = """
class Sequence:
    block_size = 256
    def __init__(self, token_ids, sampling_params=None):
        assert sampling_params is None or sampling_params.ignore_eos
        self.tokens, self.blocks, self.prepared = list(token_ids), 0, False
        self.left = sampling_params and sampling_params.max_tokens
        self.num_cached_tokens = self.num_scheduled_tokens = 0
    def append_token(self, token):
        assert len(self.tokens) < self.blocks * self.block_size or not self.blocks, "no slot"
        self.tokens.append(token)
"""

BLOCK_MANAGER = """
class BlockManager:
    def __init__(self, num_blocks, block_size):
        self.free, self.size, self.known = num_blocks, block_size, set()
    def can_allocate(self, seq):
        found = 0
        for end in range(self.size, len(seq.tokens), self.size):
            if tuple(seq.tokens[:end]) not in self.known:
                break
            found += 1
        return found
    def allocate(self, seq, found):
        assert not seq.blocks
        seq.blocks = -(-len(seq.tokens) // self.size)
        seq.num_cached_tokens = found * self.size
        self.taken = seq.blocks - found
        self.free -= self.taken
        assert self.free >= 0
    def deallocate(self, seq):
        assert seq.blocks
        seq.blocks = seq.num_cached_tokens = 0
        self.free += self.taken
    def can_append(self, seq):
        return self.free > 0 or seq.blocks * self.size > len(seq.tokens)
    def may_append(self, seq):
        if len(seq.tokens) >= seq.blocks * self.size - 1:
            seq.blocks += 1
            self.free -= 1
    def hash_blocks(self, seq):
        start, end = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
        assert end <= len(seq.tokens)
        self.known |= {tuple(seq.tokens[:at]) for at in range(start + 1, end + 1) if at % self.size == 0}
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


def check_out(folder: Path) -> Path:
    """Write it; returns the folder."""
    engine = folder / "nanovllm" / "engine"
    engine.mkdir(parents=True)
    (folder / "nanovllm" / "sampling_params.py").write_text(SAMPLING)
    (engine / "__init__.py").touch()
    sources = {
        "sequence": SEQUENCE,
        "block_manager": BLOCK_MANAGER,
        "scheduler": SCHEDULER,
        "model_runner": MODEL_RUNNER,
    }
    for name, source in sources.items():
        (engine / f"{name}.py").write_text(source)
    return folder
