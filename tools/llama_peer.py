"""llama.cpp as a peer, by the low-level interface of llama-cpp-python: batches of several sequences, nothing around.

https://github.com/abetlen/llama-cpp-python; `CMAKE_ARGS=-DGGML_NATIVE=ON` builds it for this machine.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hostcache.errors import DeviceError, MissingExtra

__all__ = ["NO_PEER", "PEER", "LlamaCpp"]

PEER = "llama.cpp"

NO_PEER = "llama-cpp-python is not installed: CMAKE_ARGS=-DGGML_NATIVE=ON pip install 'rockpage[bench]'"
"""Said where there is nothing to compare with."""


class LlamaCpp:
    """A model with one context, whose cells all sequences share.

    Args:
        model: path of a GGUF file.
        sequences: most at once; their numbers are below it.
        context: tokens of all sequences together.
        batch: most tokens of one call; they are computed in one piece.
        threads: that compute.

    Raises:
        MissingExtra: llama-cpp-python is not installed.
        DeviceError: llama.cpp does not load the model, or has no memory for the context.
    """

    def __init__(self, model: Path, *, sequences: int, context: int, batch: int = 512, threads: int = 1) -> None:
        try:
            self._library: Any = importlib.import_module("llama_cpp")
        except ModuleNotFoundError as error:
            raise MissingExtra(NO_PEER, extra="bench") from error
        library = self._library
        self._quiet = library.llama_log_callback(lambda *_: None)  # C keeps no reference
        library.llama_log_set(self._quiet, ctypes.c_void_p(0))
        library.llama_backend_init()
        self._model = library.llama_model_load_from_file(str(model).encode(), library.llama_model_default_params())
        if not self._model:
            raise DeviceError(f"llama.cpp does not load {model}: try another file", model=str(model))
        settings = library.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max, settings.kv_unified = context, sequences, True
        settings.n_batch = settings.n_ubatch = batch
        settings.n_threads = settings.n_threads_batch = threads
        self._context = library.llama_init_from_model(self._model, settings)
        if not self._context:
            library.llama_model_free(self._model)
            raise DeviceError(f"llama.cpp has no memory for a context of {context} tokens", context=context)
        self._memory = library.llama_get_memory(self._context)
        self._vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._batch = library.llama_batch_init(batch, 0, 1)
        self._lengths = [0] * sequences

    def compute(self, parts: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
        """Append tokens to sequences, in one call.

        Args:
            parts: of each sequence its number and its tokens.

        Returns:
            The most likely token behind each part; logits are computed for no other row.

        Raises:
            DeviceError: llama.cpp cannot compute it.
        """
        batch, last, row = self._batch, [], 0
        for sequence, tokens in parts:
            for token in tokens:
                batch.token[row], batch.pos[row], batch.logits[row] = int(token), self._lengths[sequence], 0
                batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence
                self._lengths[sequence] += 1
                row += 1
            batch.logits[row - 1] = 1
            last.append(row - 1)
        batch.n_tokens = row
        if status := self._library.llama_decode(self._context, batch):
            raise DeviceError(f"llama_decode returned {status} for {row} tokens: the context is full", status=status)
        return [int(self._logits(row).argmax()) for row in last]

    def share(self, source: int, others: Sequence[int]) -> None:
        """Let other, empty sequences begin with what one holds; its cells are not copied."""
        for other in others:
            self._library.llama_memory_seq_cp(self._memory, source, other, -1, -1)
            self._lengths[other] = self._lengths[source]

    def forget(self) -> None:
        """Empty all sequences."""
        self._library.llama_memory_clear(self._memory, False)
        self._lengths = [0] * len(self._lengths)

    def close(self) -> None:
        """Free all of it. Not to be used afterwards."""
        self._library.llama_batch_free(self._batch)
        self._library.llama_free(self._context)
        self._library.llama_model_free(self._model)

    def _logits(self, row: int) -> NDArray[np.float32]:
        """A view, valid until the next call."""
        return np.ctypeslib.as_array(self._library.llama_get_logits_ith(self._context, row), (self._vocab,))
