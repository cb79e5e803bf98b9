"""nano-vllm as a peer: its scheduler and block manager, out of a checkout, without the model that goes with them.

https://github.com/GeeeekExplorer/nano-vllm; the package xxhash is needed, PyTorch is not.
"""

from __future__ import annotations

import ast
import importlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hostcache.errors import MissingExtra, UsageError

__all__ = ["NO_PEER", "NO_VLLM", "PEER", "NanoVllm"]

PEER = "nano-vllm"

NO_PEER = "peer not given: pass --peer DIR, a checkout of https://github.com/GeeeekExplorer/nano-vllm"
"""Said where there is nothing to compare with."""

NO_VLLM = "vLLM's block manager is not compared: it comes with torch and CUDA alone, see docs/benchmarks.md"
"""vLLM 0.33 asks for 197 packages besides, and its block pool imports the configuration of all the rest."""


@dataclass(frozen=True)
class NanoVllm:
    """The parts of a checkout that keep books.

    Attributes:
        checkout: where it lies.
        sequence: its class `Sequence`.
        block_manager: its class `BlockManager`.
        scheduler: its class `Scheduler`.
        sampling_params: its class `SamplingParams`.
    """

    checkout: Path
    sequence: Any
    block_manager: Any
    scheduler: Any
    sampling_params: Any

    @classmethod
    def load(cls, checkout: Path) -> NanoVllm:
        """Import them.

        Raises:
            UsageError: there is no checkout.
            MissingExtra: xxhash is missing.
        """
        package = types.ModuleType("nanovllm")  # its own imports all of PyTorch
        package.__path__ = [str(checkout / "nanovllm")]
        configuration = types.ModuleType("nanovllm.config")
        configuration.Config = types.SimpleNamespace  # type: ignore[attr-defined] # only named in annotations
        sys.modules |= {"nanovllm": package, "nanovllm.config": configuration}
        try:
            sequence = importlib.import_module("nanovllm.engine.sequence")
            manager = importlib.import_module("nanovllm.engine.block_manager")
            scheduler = importlib.import_module("nanovllm.engine.scheduler")
            sampling = importlib.import_module("nanovllm.sampling_params")
        except ModuleNotFoundError as error:
            if error.name == "xxhash":
                raise MissingExtra("the peer needs the package xxhash: pip install xxhash") from error
            raise UsageError(
                f"--peer {checkout} is no checkout of nano-vllm: it has no {error.name}", checkout=checkout
            ) from error
        return cls(checkout, sequence.Sequence, manager.BlockManager, scheduler.Scheduler, sampling.SamplingParams)

    def new_scheduler(self, sequences: int, length: int, block_tokens: int) -> Any:  # noqa: ANN401 # the peer's own class
        """A scheduler for so many sequences of so many tokens, which takes all prompts in one step."""
        self.sequence.block_size = block_tokens
        return self.scheduler(
            types.SimpleNamespace(
                max_num_seqs=sequences,
                max_num_batched_tokens=sequences * length,
                eos=-1,
                kvcache_block_size=block_tokens,
                num_kvcache_blocks=sequences * -(-length // block_tokens) + 1,
            )
        )

    def new_block_manager(self, blocks: int, block_tokens: int) -> Any:  # noqa: ANN401 # the peer's own class
        """A block manager over a pool of so many blocks."""
        self.sequence.block_size = block_tokens
        return self.block_manager(blocks, block_tokens)

    def prepare_decode(self, block_tokens: int) -> Callable[[list[Any]], object]:
        """Its `ModelRunner.prepare_decode`, which makes the model's arrays; the rest of its module imports the model.

        Where that makes a tensor of a list it gets a numpy array, and moving that to a device does nothing.
        """

        class Tensor(np.ndarray):
            def cuda(self, non_blocking: bool) -> Tensor:  # noqa: ARG002 # there is no device
                return self

        def tensor(values: object, dtype: type[np.generic], pin_memory: bool) -> Tensor:  # noqa: ARG001 # nor its memory
            return np.array(values, dtype).view(Tensor)

        path = self.checkout / "nanovllm" / "engine" / "model_runner.py"
        module = ast.parse("from __future__ import annotations\n" + path.read_text(), str(path))
        runner = next(part for part in module.body if isinstance(part, ast.ClassDef) and part.name == "ModelRunner")
        wanted = {"prepare_decode", "prepare_block_tables"}
        runner.body = [part for part in runner.body if isinstance(part, ast.FunctionDef) and part.name in wanted]
        torch = types.SimpleNamespace(tensor=tensor, int32=np.int32, int64=np.int64)
        names: dict[str, Any] = {"torch": torch, "set_context": lambda *_, **__: None}
        exec(compile(ast.Module([module.body[0], runner], []), path, "exec"), names)  # noqa: S102 # the peer's code, asked for
        instance = names["ModelRunner"]()
        instance.block_size = block_tokens
        prepare: Callable[[list[Any]], object] = instance.prepare_decode
        return prepare
