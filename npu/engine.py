"""The loop: schedule a step, compute it, sample, commit; text goes in and comes out."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hostcache.cache import PagedKVCache
from hostcache.errors import UsageError
from hostcache.prefix import Namespace, PrefixCache
from hostcache.request import FinishReason
from hostcache.scheduler import Scheduler, SchedulerConfig
from hostcache.swap import SwapSpace

from .attention import AttentionRuntime
from .chat import ChatTemplate, encode_chat, turn_ends
from .decoder import Decoder, DenseModel
from .dense_folder import DenseFolder
from .fp16 import Rounding
from .interrupts import held_signals
from .memory_pressure import respond_to_pressure
from .model import ModelConfig
from .model_memory import MemoryDemand, PoolChoice, choose_pool
from .model_runner import ModelRunner
from .runtimes import PlacementName, first_choice, open_runtime
from .sampler import SamplingParams
from .score import Score, score_ids
from .sessions import KeptState, Session
from .source import open_model
from .step_guard import StepGuard
from .stepper import Stepper
from .stream import RequestOutput, Stream
from .structured import Constraint, StructureCompiler
from .text import template_of, tokenizer_of
from .token_ids import as_ids
from .tokenizer import Tokenizer

__all__ = ["Engine"]


class Engine:
    """Serves many sequences from one model and one pool. It belongs to one thread at a time.

    `Engine.load` builds all parts from a model file; the constructor takes them, and owns them from then on.

    Args:
        decoder: the dense parts of the model.
        tokenizer: text to ids and back.
        cache: the pool.
        runtime: attention over that pool.
        config: limits of a step.
        template: the model's chat template, if it has one.
        prefix_folder: where pinned prefixes are kept over restarts, see docs/state-files.md; None: nowhere.
        swap: where preempted requests leave their KV; None: it is computed again.
        pool_choice: why the pool is as large as it is; None: the caller knows.
        watch_memory: whether to respond when memory is short.

    Attributes:
        tokenizer: as given.
        scheduler: the requests' queue and its counters.
        cache: the pool.
        prefix: the prefix cache over it.
        runtime: as given.
        pool_choice: as given.
        pressure: what is done when memory is short; None: nothing. Every step tends it; whoever computes none for long
            may call its `tend` between steps.

    Example:
        >>> from npu.engine import Engine
        >>> from npu.sampler import SamplingParams
        >>> with Engine.load("model.gguf", pool_bytes=64 << 20) as engine:
        ...     print("".join(engine.generate("The capital of France is", SamplingParams(max_tokens=2))))
         Paris.
    """

    def __init__(
        self,
        decoder: DenseModel,
        tokenizer: Tokenizer,
        cache: PagedKVCache,
        runtime: AttentionRuntime,
        config: SchedulerConfig,
        *,
        template: ChatTemplate | None = None,
        prefix_folder: str | os.PathLike[str] | None = None,
        swap: SwapSpace | None = None,
        pool_choice: PoolChoice | None = None,
        watch_memory: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.cache = cache
        self.prefix = PrefixCache(cache.pool)
        self.runtime = runtime
        self.scheduler = Scheduler(cache, self.prefix, config, swap=swap)
        self._swap = swap
        self.pool_choice = pool_choice
        self.pressure = respond_to_pressure(cache, self.scheduler) if watch_memory else None
        self._runner = ModelRunner(decoder, cache, runtime)
        self._template = template
        self._structures = StructureCompiler(tokenizer)
        self._streams: dict[int, Stream] = {}
        self._stepper = Stepper(self.scheduler, self._runner, self._streams, self.pressure)
        self._outbox: dict[int, list[RequestOutput]] = {}  # by request: brought by a step and not yet handed out
        self._guard = StepGuard()
        try:
            self._kept = KeptState(cache, self.prefix, prefix_folder)
        except BaseException:
            self.close()
            raise

    @classmethod
    def load(
        cls,
        model: str | os.PathLike[str],
        *,
        runtime: str = "auto",
        pool_bytes: int | None = None,
        threads: int = 1,
        activations: Literal["int8", "fp32"] = "int8",
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
        swap_bytes: int = 0,
        cache_dir: str | os.PathLike[str] | None = None,
        prefix_folder: str | os.PathLike[str] | None = None,
        watch_memory: bool = True,
    ) -> Engine:
        """Load a model and take the pool.

        Args:
            model: path of a GGUF file or of a Hugging Face folder.
            runtime: see `npu.runtimes.RuntimeName`.
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
            step_seconds: how long an answer may pause while prompts are computed, see `SchedulerConfig`.
            swap_bytes: memory beside the pool for the KV of preempted requests; 0: it is computed again.
            cache_dir: where repacked weights are kept; None: the user's cache folder.
            prefix_folder: where pinned prefixes are kept over restarts; None: nowhere.
            watch_memory: whether to respond when memory is short, see docs/memory-pressure.md.

        Raises:
            ModelError: the file is damaged or of a kind rockpage does not run.
            RegionError: less memory is left than the model, its runtime and the pool will take.
            UsageError: an option is out of range, or graphs or segments are missing or for another model.
            MissingExtra: what the runtime needs is not installed.
            DeviceError: the simulator or the NPU cannot be used.
        """
        with open_model(model) as source, ExitStack() as opened:
            model_config = ModelConfig.from_gguf(source)
            config = SchedulerConfig(
                context_length=model_config.context(context_length),
                max_rows=max_rows,
                max_sequences=max_sequences,
                prefill_chunk=min(prefill_chunk, max_rows),
                step_seconds=step_seconds,
            )
            segments = None if dense is None else DenseFolder(dense, source, cache_dir=cache_dir)
            demand = MemoryDemand(
                activations,
                runtime=first_choice(runtime, graphs),
                max_rows=max_rows,
                weights_bytes=None if segments is None else segments.manifest.npu_bytes,
                resident_bytes=resident_bytes,
                swap_bytes=swap_bytes,
            )
            pool = choose_pool(source, demand, asked=pool_bytes)
            tokenizer, template = tokenizer_of(source), template_of(source)
            decoder: DenseModel = (
                Decoder.load(source, activations=activations, threads=threads, max_rows=max_rows, cache_dir=cache_dir)
                if segments is None
                else segments.load(max_rows)
            )
            opened.callback(decoder.close)
            cache = PagedKVCache.create(model_config.geometry, pool.nbytes)
            opened.callback(cache.close)
            swap = SwapSpace(swap_bytes, cache) if swap_bytes else None
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
                cache_dir=cache_dir,
            )
            opened.pop_all()
        return cls(
            decoder,
            tokenizer,
            cache,
            attention,
            config,
            template=template,
            prefix_folder=prefix_folder,
            swap=swap,
            pool_choice=pool,
            watch_memory=watch_memory,
        )

    @held_signals()
    def add_request(
        self,
        prompt: str | ArrayLike,
        params: SamplingParams | None = None,
        *,
        salt: str = "",
        prompt_version: str = "",
        priority: int = 0,
        client: str = "",
        deadline: float | None = None,
        max_queue_seconds: float | None = None,
    ) -> int:
        """Queue a prompt; `step` brings its tokens.

        Args:
            prompt: text (special tokens in it are plain text), or token ids.
            params: how to sample; None is greedy. `max_tokens` is cut to what the context leaves.
            salt: only requests with the same salt share KV.
            prompt_version: only requests with the same version share KV.
            priority: higher ones go first; see `Scheduler.submit` for this and what follows.
            client: who asks.
            deadline: when it fails if it has not ended, a value of `time.monotonic()`.
            max_queue_seconds: how long it may wait to be admitted.

        Returns:
            The request's id.

        Raises:
            RequestRefused: it can never fit, or too many wait already, or memory is short.
            UsageError: no valid Unicode, an id outside the vocabulary, a structure that cannot be used, or the engine
                is closed.
            MissingExtra: the structure needs a library that is not installed.
        """
        self._guard.check_open()
        if self.pressure is not None:
            self.pressure.check_admissible()
        params = params or SamplingParams()
        constraint = self._prepare(params)
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else self._ids(prompt)
        room = max(1, self.scheduler.config.context_length - tokens.size)
        if tokens.ndim == 1:
            self._kept.recall(self._namespace(salt, prompt_version), tokens.astype(np.int32))
        request = self.scheduler.submit(
            tokens,
            self._namespace(salt, prompt_version),
            min(params.max_tokens, room),
            priority=priority,
            client=client,
            deadline=deadline,
            max_queue_seconds=max_queue_seconds,
        )
        self._streams[request.id] = Stream(request, params, self.tokenizer, constraint=constraint)
        return request.id

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> NDArray[np.int32]:  # noqa: ANN401
        """Turn a conversation into a prompt by the model's chat template, whose end of a turn then ends answers too.

        Args:
            messages: each with `role` and `content`, oldest first.
            options: `tools`, `documents` and more, as in `npu.chat.encode_chat`.

        Returns:
            int32 ids. Control tokens come from the template alone, never from a message.

        Raises:
            UsageError: the model has no template, or the template refuses the messages.

        Example:
            >>> from npu.engine import Engine
            >>> with Engine.load("model.gguf", pool_bytes=64 << 20) as engine:
            ...     prompt = engine.encode_chat([{"role": "user", "content": "Hello"}])
            ...     print(engine.tokenizer.decode(prompt, special=True).splitlines()[-3:])
            ['<|im_start|>user', 'Hello<|im_end|>', '<|im_start|>assistant']
        """
        if self._template is None:
            raise UsageError("this model has no chat template: give the whole prompt as text")
        with self._template.one_budget():
            self.tokenizer.eos_ids |= turn_ends(self.tokenizer, self._template)
            return encode_chat(self.tokenizer, self._template, messages, **options)

    @held_signals()
    def fork(self, request_id: int, params: SamplingParams | None = None) -> int:
        """Continue a running request a second time, sharing everything computed so far.

        The fork is one of the `max_sequences`; beyond them it waits, and shares what the prefix cache has when it runs.

        Args:
            request_id: the parent, not waiting.
            params: how the fork samples, and how many tokens its answer may have, those it shares included, cut to
                what the context leaves; None: as the parent, whose seed it shares.

        Returns:
            The fork's id.

        Raises:
            UsageError: no such request runs, its answer has as many tokens already as `params` allows, or `params`
                cannot be used, as in `add_request`.
            MissingExtra: the structure needs a library that is not installed.
        """
        parent = self._streams.get(request_id)
        if parent is None:
            raise UsageError(f"no request {request_id} is running", request_id=request_id)
        constraint = self._prepare(params or parent.params)
        room = self.scheduler.config.context_length - parent.request.prompt_length
        child = self.scheduler.fork(parent.request, None if params is None else min(params.max_tokens, room))
        self._streams[child.id] = parent.fork(child, self.tokenizer, params, constraint)
        return child.id

    @held_signals()
    def abort(self, request_id: int) -> None:
        """End a request; its blocks go back at once, and what was not handed out of it is dropped.

        Unknown and finished ids are ignored. Within a step, where a signal handler or a forgotten generator may call
        this, it takes effect when the step is over.
        """
        if self._guard.busy:
            self._guard.put_off(lambda: self.abort(request_id))
            return
        self._outbox.pop(request_id, None)
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.scheduler.end(stream.request, FinishReason.ABORTED)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute and nothing to hand out."""
        return self.scheduler.idle and not self._outbox

    def step(self) -> list[RequestOutput]:
        """Compute one step.

        Whatever goes wrong in it, Ctrl-C included, the step is rolled back and the requests are as before it; or it
        was complete, and the next call brings its outputs.

        Returns:
            One entry per request that got a token or ended.

        Raises:
            UsageError: the engine is closed, or a step is under way.
        """
        self._advance()
        outbox, self._outbox = self._outbox, {}
        return [output for outputs in outbox.values() for output in outputs]

    def generate(
        self, prompt: str | ArrayLike, params: SamplingParams | None = None, *, salt: str = "", prompt_version: str = ""
    ) -> Generator[str, None, None]:
        """Stream one request's text. Other requests go on beside it; closing the iterator aborts this one.

        Raises:
            RequestRefused: it can never fit.
            RequestFailed: it was accepted and could not be finished.
            UsageError: its outputs went elsewhere: `step` took them, or it was aborted.
        """
        request_id = 0  # no request has it
        try:
            with held_signals():  # an interruption must not come between a request and its id
                request_id = self.add_request(prompt, params, salt=salt, prompt_version=prompt_version)
            while True:
                if request_id not in self._outbox:
                    if request_id not in self._streams:
                        raise UsageError(
                            f"request {request_id} was aborted, or step() took its outputs", request_id=request_id
                        )
                    self._advance()
                for output in self._outbox.pop(request_id, ()):
                    if output.error is not None:
                        raise output.error
                    if output.text:
                        yield output.text
                    if output.finish_reason is not None:
                        return
        finally:
            self.abort(request_id)

    @held_signals()
    def score(self, tokens: ArrayLike) -> Score:
        """Teacher-force a text: how likely is each of its tokens, given all before it.

        It is computed through the paged cache like any prompt, in chunks, and leaves nothing in the prefix cache.

        Args:
            tokens: ids, at least two.

        Raises:
            RequestRefused: fewer than two tokens, or more than the context or the pool holds.
            RequestFailed: the model's numbers are broken.
            UsageError: an id is outside the vocabulary.

        Example:
            >>> from npu.engine import Engine
            >>> with Engine.load("model.gguf", pool_bytes=64 << 20) as engine:
            ...     score = engine.score(engine.tokenizer.encode("The capital of France is Rome"))
            ...     print(engine.tokenizer.decode(score.top1[-1:]))  # what the model would rather have read
             Paris
        """
        ids = self._ids(tokens).astype(np.int32)
        with self._guard.step():
            return score_ids(ids, self._namespace("", ""), self.cache, self.scheduler.config, self._runner.compute)

    def pin(
        self, prompt: str | ArrayLike, owner: str, seconds: float, *, salt: str = "", prompt_version: str = ""
    ) -> int:
        """Keep what prompts begin with in the pool, and in `prefix_folder`: read from there, or else computed now.

        Args:
            prompt: as in `add_request`.
            owner: for `engine.prefix.unpin(owner)`.
            seconds: how long it stays pinned at most.
            salt: whose prompts it is for.
            prompt_version: likewise.

        Returns:
            Tokens that are pinned: the full blocks of the prompt.

        Raises:
            UsageError: more than may be pinned, `seconds` is not positive, or as in `generate`.
            RequestRefused: it can never fit.
            RequestFailed: it could not be computed.
        """
        tokens = self._tokens(prompt)
        namespace = self._namespace(salt, prompt_version)
        whole = tokens.size // self.cache.geometry.block_tokens * self.cache.geometry.block_tokens
        if self._kept.recall(namespace, tokens) < whole:
            for _ in self.generate(tokens, SamplingParams(max_tokens=1), salt=salt, prompt_version=prompt_version):
                pass
        with held_signals(), self._guard.step():
            return self._kept.pin(namespace, tokens, owner, seconds)

    @held_signals()
    def save_session(
        self,
        path: str | os.PathLike[str],
        tokens: ArrayLike,
        *,
        note: bytes = b"",
        salt: str = "",
        prompt_version: str = "",
    ) -> int:
        """Save a conversation, its KV included as far as it is in the pool, in the place of a file that is there.

        Args:
            path: the file; see docs/state-files.md.
            tokens: ids of the prompt and its answer, or more of such.
            note: what to keep beside them.
            salt: as the conversation's.
            prompt_version: likewise.

        Returns:
            Tokens whose KV is in the file.

        Raises:
            UsageError: an id is outside the vocabulary.
            OSError: the file cannot be written; one that was there is there still.
        """
        with self._guard.step():
            return self._kept.save(Path(path), self._namespace(salt, prompt_version), self._tokens(tokens), note)

    @held_signals()
    def load_session(self, path: str | os.PathLike[str], *, salt: str = "", prompt_version: str = "") -> Session:
        """Load a conversation; a prompt that begins with its tokens goes on from there.

        Raises:
            BadStateFile: the file is damaged, and was set aside, or is no state file.
            UsageError: it was saved with another model, other options or another salt; it stays.
            OSError: it cannot be read.
        """
        with self._guard.step():
            return self._kept.load(Path(path), self._namespace(salt, prompt_version))

    def close(self) -> None:
        """Give back threads, buffers, the NPU and the pool; weights on the CPU go with the engine. Safe to call twice.

        Raises:
            UsageError: it was called from within a step, which still uses them.
        """
        self._guard.close()
        for request_id in list(self._streams):
            self.abort(request_id)
        self.runtime.close()
        self._runner.close()
        if self.pressure is not None:
            self.pressure.close()
        if self._swap is not None:
            self._swap.close()
        self.cache.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @held_signals()
    def _advance(self) -> None:
        """Compute one step; its outputs wait in the outbox, where no interruption can lose them."""
        with self._guard.step():
            for output in self._stepper.step():
                self._outbox.setdefault(output.request_id, []).append(output)

    def _prepare(self, params: SamplingParams) -> Constraint | None:
        """Refuse what cannot be sampled with this model before anything is queued; the constraint of one request."""
        self._ids(list(params.logit_bias))
        return self._structures.constraint(params.structure) if params.structure else None

    def _namespace(self, salt: str, prompt_version: str) -> Namespace:
        return Namespace(self._runner.numerics, salt=salt, prompt_version=prompt_version)

    def _tokens(self, prompt: str | ArrayLike) -> NDArray[np.int32]:
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else self._ids(prompt)
        return tokens.astype(np.int32)

    def _ids(self, tokens: ArrayLike) -> NDArray[Any]:
        return as_ids(tokens, self.tokenizer.vocab_size)
