"""A stand-in for llama_cpp, which counts: the token behind a sequence of n tokens is n modulo its vocabulary of 256."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

VOCAB = 256


class FakeLlama(SimpleNamespace):
    """The functions that `tools.llama_peer` calls.

    Attributes:
        loads: whether a model is loaded.
        calls: of each `llama_decode`, the (sequence, position, token) of each row.
        lengths: tokens of each sequence.
        wanted: rows of the latest call whose logits were asked for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loads = True
        self.calls: list[list[tuple[int, int, int]]] = []
        self.lengths: dict[int, int] = {}
        self.wanted: dict[int, int] = {}
        self.closed: list[str] = []
        self.llama_backend_init = self.llama_log_set = lambda *_: None
        self.llama_log_callback = lambda function: function
        self.llama_model_default_params = self.llama_context_default_params = SimpleNamespace
        self.llama_model_load_from_file = lambda *_: "model" if self.loads else None
        self.llama_init_from_model = lambda _, settings: settings
        self.llama_get_memory = self.llama_model_get_vocab = lambda owner: owner
        self.llama_vocab_n_tokens = lambda _: VOCAB
        self.llama_batch_free = lambda _: self.closed.append("batch")
        self.llama_free = lambda _: self.closed.append("context")
        self.llama_model_free = lambda _: self.closed.append("model")

    def llama_batch_init(self, size: int, _: int, __: int) -> Any:
        columns = {name: [0] * size for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(**columns, seq_id=[[0] for _ in range(size)], n_tokens=0)

    def llama_decode(self, settings: Any, batch: Any) -> int:
        rows = range(batch.n_tokens)
        self.calls.append([(batch.seq_id[row][0], batch.pos[row], batch.token[row]) for row in rows])
        self.wanted = {}
        for row, (sequence, position, _) in enumerate(self.calls[-1]):
            assert position == self.lengths.get(sequence, 0)  # as llama.cpp demands
            self.lengths[sequence] = position + 1
            if batch.logits[row]:
                self.wanted[row] = position + 1
        return int(sum(self.lengths.values()) > settings.n_ctx)

    def llama_get_logits_ith(self, _: Any, row: int) -> Any:
        logits = (ctypes.c_float * VOCAB)()
        logits[self.wanted[row] % VOCAB] = 1
        self._kept = logits
        return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))

    def llama_memory_clear(self, *_: Any) -> None:
        self.lengths = {}

    def llama_memory_seq_cp(self, _: Any, source: int, destination: int, *__: int) -> None:
        self.lengths[destination] = self.lengths[source]
