"""What an engine is made of, and how that comes from a model's files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypedDict

from hostcache.cache import PagedKVCache
from hostcache.codec import FP16, INT4, Codec, codec_named
from hostcache.errors import UsageError
from hostcache.scheduler_config import SchedulerConfig
from hostcache.swap import SwapSpace
from hostcache.table import TurnBlock

from .attention import AttentionRuntime
from .chat import ChatTemplate
from .decoder import DenseModel
from .decoder_choice import load_decoder
from .dense_folder import DenseFolder
from .fp16 import Rounding
from .key_balance import KeyBalance
from .key_statistics import load_key_balance
from .kv_choice import KvChoice, choose_kv
from .model import ModelConfig
from .model_memory import MemoryDemand, PoolChoice, choose_pool
from .overflow import ContextRules
from .rerotation import Rerotation
from .runtimes import PlacementName, first_choice, open_runtime
from .source import open_model
from .speculation import PromptLookup
from .text import template_of, tokenizer_of
from .tokenizer import Tokenizer
from .weights import Activations

__all__ = ["EngineParts", "LoadOptions", "load_parts"]


@dataclass(frozen=True, eq=False)
class EngineParts:
    """What an engine is made of. Whoever has the parts closes them: the engine, once it has taken them.

    Attributes:
        decoder: the dense parts of the model.
        tokenizer: text to ids and back.
        cache: the pool.
        runtime: attention over that pool.
        config: limits of a step.
        template: the model's chat template, if it has one.
        swap: where preempted requests leave their KV; None: it is computed again.
        pool_choice: why the pool is as large as it is; None: the caller knows.
        prefix_folder: where pinned prefixes are kept over restarts, see docs/state-files.md; None: nowhere.
        watch_memory: whether to respond when memory is short.
        lookup: proposes tokens for answers; None: nobody does.
        windows: the model's own, by layer: tokens, 0 for a layer that sees everything; empty: there are none.
        turn: turns the keys of a block to other positions, for requests that slide; None: none may.
        codec: how requests store their KV if they do not say.
        kv_choice: why that is the codec; None: the caller knows.
        balance: the form of keys in int4, see `npu.key_balance`.
        stopwatch: seconds, by which the scheduler learns what steps take; `time.process_time` leaves out what other
            programs took of the one core that computes.
    """

    decoder: DenseModel
    tokenizer: Tokenizer
    cache: PagedKVCache
    runtime: AttentionRuntime
    config: SchedulerConfig
    template: ChatTemplate | None = None
    swap: SwapSpace | None = None
    pool_choice: PoolChoice | None = None
    prefix_folder: str | os.PathLike[str] | None = None
    watch_memory: bool = False
    lookup: PromptLookup | None = None
    windows: tuple[int, ...] = ()
    turn: TurnBlock | None = None
    codec: Codec = FP16
    kv_choice: KvChoice | None = None
    balance: KeyBalance | None = None
    stopwatch: Callable[[], float] = time.monotonic

    @property
    def context_rules(self) -> ContextRules:
        """What requests get of the model's context."""
        return ContextRules(self.config.context_length, self.cache.geometry.block_tokens, self.windows)

    def close(self) -> None:
        """Give back threads, buffers, the NPU and the pool; the CPU's weights go with the parts. Safe to call twice."""
        self.runtime.close()
        self.decoder.close()
        if self.swap is not None:
            self.swap.close()
        self.cache.close()


class LoadOptions(TypedDict, total=False):
    """The keywords of `load_parts`, which says what they are, for those who pass them on."""

    runtime: str
    kv: str | None
    planned_sessions: int
    pool_bytes: int | None
    threads: int
    activations: Activations
    rounding: Rounding
    graphs: str | os.PathLike[str] | None
    dense: str | os.PathLike[str] | None
    placement: PlacementName | None
    resident_bytes: int
    context_length: int | None
    max_rows: int
    max_sequences: int
    prefill_chunk: int
    step_seconds: float | None
    max_waiting: int
    ageing_seconds: float
    client_weights: Mapping[str, float]
    max_preemptions: int
    swap_bytes: int
    swap_folder: str | os.PathLike[str] | None
    cache_dir: str | os.PathLike[str] | None
    prefix_folder: str | os.PathLike[str] | None
    watch_memory: bool
    speculate: int


def load_parts(
    model: str | os.PathLike[str],
    *,
    runtime: str = "auto",
    kv: str | None = None,
    planned_sessions: int = 1,
    pool_bytes: int | None = None,
    threads: int = 1,
    activations: Activations = "int8",
    rounding: Rounding = "output",
    graphs: str | os.PathLike[str] | None = None,
    dense: str | os.PathLike[str] | None = None,
    placement: PlacementName | None = None,
    resident_bytes: int = 0,
    context_length: int | None = None,
    max_rows: int = 256,
    max_sequences: int = 64,
    prefill_chunk: int = 64,
    step_seconds: float | None = None,
    max_waiting: int = SchedulerConfig.max_waiting,
    ageing_seconds: float = SchedulerConfig.ageing_seconds,
    client_weights: Mapping[str, float] = MappingProxyType({}),
    max_preemptions: int = SchedulerConfig.max_preemptions,
    swap_bytes: int = 0,
    swap_folder: str | os.PathLike[str] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    prefix_folder: str | os.PathLike[str] | None = None,
    watch_memory: bool = True,
    speculate: int = 0,
) -> EngineParts:
    """Load a model and take the pool; the caller closes the parts.

    Args:
        model: path of a GGUF file or of a Hugging Face folder.
        runtime: see `npu.runtimes.RuntimeName`.
        kv: how requests store their KV if they do not say, `"fp16"`, `"int8"` or `"int4"`; they may ask for a richer
            one, not for a leaner one. See docs/codecs.md for what it costs. None: fp16; or int8, where a
            `context_length` is given and the pool has no room in fp16 for the planned sessions of that length.
        planned_sessions: of `context_length` tokens each that the pool is to hold at once, where `kv` is None.
        pool_bytes: memory for KV, rounded down to whole blocks; None: 192 MiB, or less where less is left.
        threads: threads of the dense parts and of the `cpu` runtime.
        activations: `"int8"` is fast, `"fp32"` exact.
        rounding: where the emulated NPU rounds to fp16.
        graphs: the model's attention graphs, for a board's NPU: what `rockpage export attention` wrote.
        dense: the model's dense segments, what `rockpage export dense` wrote: a board's NPU computes them, and
            `activations` has no effect. None: this machine's CPU does.
        placement: what a staged runtime's device attends, see `npu.runtimes.PlacementName`.
        resident_bytes: memory in which decoding sequences stay staged from step to step, beside the pool.
        context_length: most tokens a sequence may hold; None: what the model was trained for.
        max_rows: most tokens computed in one step.
        max_sequences: most sequences that run at once.
        prefill_chunk: most prompt tokens of one sequence in one step.
        step_seconds: how long an answer may pause while prompts are computed, see `hostcache.SchedulerConfig`.
        max_waiting: most requests that wait; more are refused.
        ageing_seconds: waiting that is worth one priority.
        client_weights: shares of clients that are not to count as 1, by the name that their requests give.
        max_preemptions: how often a request may lose its blocks to others before all that it may need is kept for it.
        swap_bytes: room beside the pool for the KV of preempted requests; 0: it is computed again.
        swap_folder: where a file without a name holds that; a disk, which costs no memory. None: memory does.
        cache_dir: where repacked weights are kept; None: the user's cache folder.
        prefix_folder: where pinned prefixes are kept over restarts; None: nowhere.
        watch_memory: whether to respond when memory is short, see docs/memory-pressure.md.
        speculate: tokens guessed at a time from what the prompt and the answer have said before, see
            `npu.speculation.PromptLookup`; answers stay the same. 0: none.

    Raises:
        ModelError: the file is damaged or of a kind rockpage does not run.
        RegionError: less memory is left than the model, its runtime and the pool will take, or less room in the folder.
        UsageError: an option is out of range, or graphs or segments are missing or for another model.
        MissingExtra: what the runtime needs is not installed.
        DeviceError: the simulator or the NPU cannot be used.
    """
    if swap_folder is not None and not swap_bytes:
        raise UsageError(f"nothing is swapped to {swap_folder}: give swap_bytes (--swap), too", folder=swap_folder)
    if kv is not None:
        codec_named(kv)  # before anything is read
    if planned_sessions < 1:
        raise UsageError(f"planned_sessions must be 1 or more, got {planned_sessions}", sessions=planned_sessions)
    lookup = PromptLookup(speculate) if speculate else None
    with open_model(model) as source, ExitStack() as opened:
        model_config = ModelConfig.from_gguf(source)
        context = model_config.context(context_length)
        # One that holds the whole context hides nothing, and is none.
        windows = tuple(window if window < context else 0 for window in model_config.windows)
        config = SchedulerConfig(
            context_length=context,
            max_rows=max_rows,
            max_sequences=max_sequences,
            prefill_chunk=min(prefill_chunk, max_rows),
            step_seconds=step_seconds,
            max_waiting=max_waiting,
            ageing_seconds=ageing_seconds,
            client_weights=client_weights,
            max_preemptions=max_preemptions,
            model_window=max(windows) if all(windows) else 0,
        )
        segments = None if dense is None else DenseFolder(dense, source, cache_dir=cache_dir)
        demand = MemoryDemand(
            activations,
            runtime=first_choice(runtime, graphs),
            max_rows=max_rows,
            weights_bytes=None if segments is None else segments.manifest.npu_bytes,
            resident_bytes=resident_bytes,
            swap_bytes=swap_bytes if swap_folder is None else 0,
        )
        pool = choose_pool(source, demand, asked=pool_bytes)
        choice = choose_kv(kv, model_config.geometry, pool.nbytes, context=context_length, sessions=planned_sessions)
        codec = choice.codec
        tokenizer, template = tokenizer_of(source), template_of(source)
        decoder: DenseModel = (
            load_decoder(source, activations=activations, threads=threads, max_rows=max_rows, cache_dir=cache_dir)
            if segments is None
            else segments.load(max_rows)
        )
        opened.callback(decoder.close)
        balance = (
            load_key_balance(decoder, model_config, tokenizer, max_rows=max_rows, cache_dir=cache_dir, windows=windows)
            if codec is INT4
            else None
        )
        cache = PagedKVCache.create(model_config.geometry, pool.nbytes, codec)
        opened.callback(cache.close)
        swap = SwapSpace(swap_bytes, cache, swap_folder) if swap_bytes else None
        if swap is not None:
            opened.callback(swap.close)
        attention = open_runtime(
            runtime,
            cache,
            model_config.heads,
            threads=threads,
            rounding=rounding,
            graphs=graphs,
            placement=placement,
            resident_bytes=resident_bytes,
            windows=windows,
            cache_dir=cache_dir,
        )
        interleaved = model_config.family.interleaved
        rerotation = Rerotation(cache, model_config.rope, interleaved=interleaved, balance=balance)
        opened.pop_all()
    return EngineParts(
        decoder,
        tokenizer,
        cache,
        attention,
        config,
        template=template,
        swap=swap,
        pool_choice=pool,
        prefix_folder=prefix_folder,
        watch_memory=watch_memory,
        lookup=lookup,
        windows=windows,
        turn=rerotation.turn,
        codec=codec,
        kv_choice=choice,
        balance=balance,
    )
