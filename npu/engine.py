"""The loop: schedule a step, compute it, sample, commit; text goes in and comes out."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hostcache.codec import Codec
from hostcache.errors import UsageError
from hostcache.namespace import Namespace
from hostcache.prefix_caches import PrefixCaches
from hostcache.request import FinishReason
from hostcache.scheduler import Scheduler

from .beam import BeamAnswer, BeamParams, BeamSearch
from .chat import encode_chat, turn_ends
from .interrupts import held_signals
from .loading import EngineParts, LoadOptions, load_parts
from .memory_pressure import Readable, respond_to_pressure, wait_for
from .model_runner import ModelRunner
from .queue_options import QueueOptions
from .sampler import SamplingParams
from .score import Score, score_ids
from .sessions import KeptState, Sessions
from .step_guard import StepGuard
from .stepper import Stepper
from .stream import RequestOutput, Stream
from .stream_intake import StreamIntake
from .token_ids import as_ids, prompt_ids

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Engine"]


class Engine:
    """Serves many sequences from one model and one pool. It belongs to one thread at a time.

    `Engine.load` builds all parts from a model file; the constructor takes them, and owns them from then on.

    Args:
        parts: what it is made of.

    Attributes:
        tokenizer: text to ids and back.
        scheduler: the requests' queue and its counters.
        cache: the pool.
        prefix: the prefix caches over it, one for each codec.
        runtime: attention over that pool.
        pool_choice: why the pool is as large as it is; None: whoever built the parts knows.
        kv_choice: why requests store their KV as they do; None: likewise.
        pressure: what is done when memory is short; None: nothing. Every step tends it, and so do `wait` and `tend`.

    Raises:
        UsageError: the folder for pinned prefixes cannot be used.

    Example:
        >>> from npu.engine import Engine
        >>> from npu.sampler import SamplingParams
        >>> with Engine.load("model.gguf", pool_bytes=64 << 20) as engine:
        ...     print("".join(engine.generate("The capital of France is", SamplingParams(max_tokens=2))))
         Paris.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self.tokenizer = parts.tokenizer
        self.cache = parts.cache
        self.runtime = parts.runtime
        self.pool_choice = parts.pool_choice
        self.kv_choice = parts.kv_choice
        self.prefix = PrefixCaches(self.cache.pools)
        self.scheduler = Scheduler(
            self.cache, self.prefix, parts.config, swap=parts.swap, turn=parts.turn, work=self.runtime.work
        )
        try:
            self._kept = KeptState(self.cache, self.prefix, parts.prefix_folder)
        except BaseException:
            parts.close()
            raise
        self.pressure = respond_to_pressure(self.cache, self.scheduler) if parts.watch_memory else None
        self._runner = ModelRunner(parts.decoder, self.cache, self.runtime, parts.balance)
        self._intake = StreamIntake(
            self.scheduler, self.tokenizer, self._kept, self._runner.numerics, parts.context_rules, codec=parts.codec
        )
        self._streams: dict[int, Stream] = {}
        self._stepper = Stepper(
            self.scheduler, self._runner, self._streams, self.pressure, parts.lookup, stopwatch=parts.stopwatch
        )
        self._outbox: dict[int, list[RequestOutput]] = {}  # by request: brought by a step and not yet handed out
        self._guard = StepGuard()

    @classmethod
    def load(cls, model: str | os.PathLike[str], **options: Unpack[LoadOptions]) -> Engine:
        """Load a model and take the pool.

        Args:
            model: path of a GGUF file or of a Hugging Face folder.
            options: runtime, size of the pool, limits and more: the keywords of `npu.loading.load_parts`.

        Raises:
            RockpageError: as `npu.loading.load_parts`.
            UsageError: likewise, or the folder for pinned prefixes cannot be used.
        """
        return cls(load_parts(model, **options))

    @held_signals()
    def add_branches(
        self, prompt: str | ArrayLike, count: int, params: SamplingParams | None = None, **options: Unpack[QueueOptions]
    ) -> tuple[int, ...]:
        """Queue several answers to one prompt, whose blocks are computed once and shared.

        Each is what `add_request` would give for the same prompt and its own seed: `params.seed` for the first, and
        one more, modulo 2**64, for each that follows; if `params` has none, each has a fresh one.

        Args:
            prompt: as in `add_request`.
            count: answers, at least 1; those beyond `max_sequences` wait their turn.
            params: as in `add_request`.
            options: the other arguments of `add_request`.

        Returns:
            Their ids; `step` brings the tokens of each.

        Raises:
            RockpageError: as in `add_request`; nothing was queued.
            UsageError: likewise, or `count` is below 1.
        """
        self._check_admissible()
        streams = self._intake.branches(prompt, count, params or SamplingParams(), **options)
        self._streams |= {stream.request.id: stream for stream in streams}
        return tuple(stream.request.id for stream in streams)

    @held_signals()
    def add_request(
        self, prompt: str | ArrayLike, params: SamplingParams | None = None, **options: Unpack[QueueOptions]
    ) -> int:
        """Queue a prompt; `step` brings its tokens.

        Args:
            prompt: text (special tokens in it are plain text), or token ids.
            params: how to sample; None is greedy.
            options: how it is queued, whose KV it may share, and what happens at the end of the context: the keywords
                of `npu.queue_options.QueueOptions`.

        Returns:
            The request's id.

        Raises:
            RequestRefused: it can never fit, or too many wait already, or memory is short.
            UsageError: no valid Unicode, an id outside the vocabulary, a structure or an option that cannot be used, or
                the engine is closed.
            MissingExtra: the structure needs a library that is not installed.
        """
        self._check_admissible()
        stream = self._intake.open(prompt, params or SamplingParams(), **options)
        self._streams[stream.request.id] = stream
        return stream.request.id

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
        if self._parts.template is None:
            raise UsageError("this model has no chat template: give the whole prompt as text")
        with self._parts.template.one_budget():
            self.tokenizer.eos_ids |= turn_ends(self.tokenizer, self._parts.template)
            return encode_chat(self.tokenizer, self._parts.template, messages, **options)

    @held_signals()
    def fork(self, request_id: int, params: SamplingParams | None = None) -> int:
        """Continue a running request a second time, sharing everything computed so far.

        The fork is one of the `max_sequences`; beyond them it waits, and shares what the prefix cache has when it runs.

        Args:
            request_id: the parent, not waiting.
            params: how the fork samples, and how many tokens its answer may have, those it shares included; None: as
                the parent, whose seed it shares. At the end of the context it does what its parent does.

        Returns:
            The fork's id.

        Raises:
            UsageError: no such request runs, its answer has as many tokens already as `params` allows, or `params`
                cannot be used, as in `add_request`.
            RequestRefused: the parent's overflow policy is to refuse, and `params` asks for more than the context has.
            MissingExtra: the structure needs a library that is not installed.
        """
        parent = self._streams.get(request_id)
        if parent is None:
            raise UsageError(f"no request {request_id} is running", request_id=request_id)
        child = self._intake.fork(parent, params)
        self._streams[child.request.id] = child
        return child.request.id

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

    @held_signals()
    def tend(self) -> None:
        """Respond to memory pressure while no step is taken; for a timer, four times a second. `wait` does it, too.

        Raises:
            UsageError: the engine is closed, or a step is under way.
        """
        with self._guard.step():
            if self.pressure is not None:
                self.pressure.tend()

    def wait(self, seconds: float, *readable: int | Readable) -> bool:
        """Sleep while the engine is idle, and give memory back meanwhile if others need it.

        This is how a service waits for requests, in place of `time.sleep` or `select.select`.

        Args:
            seconds: how long, at most. If the engine is not idle, it does not sleep.
            readable: sockets, pipes or descriptors; what comes by one of them ends the sleep.

        Returns:
            Whether one of them can be read.

        Raises:
            UsageError: `seconds` is negative, the engine is closed, or a step is under way.

        Example:
            >>> import os
            >>> from npu.engine import Engine
            >>> ours, theirs = os.pipe()
            >>> with Engine.load("model.gguf", pool_bytes=64 << 20) as engine:
            ...     engine.wait(0.01, ours), os.write(theirs, b"a request"), engine.wait(60, ours)
            (False, 9, True)
        """
        return wait_for(readable, seconds, self.pressure, tend=self.tend, idle=lambda: self.idle)

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
        self, prompt: str | ArrayLike, params: SamplingParams | None = None, **options: Unpack[QueueOptions]
    ) -> Generator[str, None, None]:
        """Stream the text of a request, which is made as by `add_request`; closing the iterator aborts it.

        Raises:
            RequestRefused: it can never fit.
            RequestFailed: it was accepted and could not be finished.
            UsageError: its outputs went elsewhere: `step` took them, or it was aborted.
        """
        request_id = 0  # no request has it
        try:
            with held_signals():  # an interruption must not come between a request and its id
                request_id = self.add_request(prompt, params, **options)
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
    def score(self, tokens: ArrayLike, *, kv: str | None = None) -> Score:
        """Teacher-force a text: how likely is each of its tokens, given all before it.

        It is computed through the paged cache like any prompt, in chunks, and leaves nothing in the prefix cache.

        Args:
            tokens: ids, at least two.
            kv: how KV is stored meanwhile, as in `add_request`.

        Raises:
            RequestRefused: fewer than two tokens, or more than the context or the pool holds.
            RequestFailed: the model's numbers are broken.
            UsageError: an id is outside the vocabulary, or the engine does not serve the codec.

        Example:
            >>> from npu.engine import Engine
            >>> with Engine.load("model.gguf", pool_bytes=64 << 20) as engine:
            ...     score = engine.score(engine.tokenizer.encode("The capital of France is Rome"))
            ...     print(engine.tokenizer.decode(score.top1[-1:]))  # what the model would rather have read
             Paris
        """
        ids = as_ids(tokens, self.tokenizer.vocab_size)
        with self._guard.step():
            config, compute = self.scheduler.config, self._runner.compute
            return score_ids(ids, self.namespace(kv=kv), self.cache, config, compute, codec=self.codec(kv))

    @held_signals()
    def beam_search(self, prompt: str | ArrayLike, params: BeamParams) -> list[BeamAnswer]:
        """Search for the most likely answers to a prompt; it shares nothing with requests, which wait meanwhile.

        Returns:
            At most `params.width` answers, the best first.

        Raises:
            RockpageError: as `npu.beam.BeamSearch` and its `run`, or an id is outside the vocabulary.
        """
        tokens = prompt_ids(prompt, self.tokenizer)
        with self._guard.step():
            config, compute = self.scheduler.config, self._runner.compute
            search = BeamSearch(params, self.tokenizer.eos_ids, self.cache, config, compute, codec=self.codec())
            return search.run(tokens, self.namespace())

    @property
    def sessions(self) -> Sessions:
        """Conversations and prefixes that outlive the engine."""
        return Sessions(self, self._kept, self._guard)

    def namespace(self, salt: str = "", prompt_version: str = "", kv: str | None = None) -> Namespace:
        """What requests share KV in, for calls of `prefix`; the arguments are those of `add_request`."""
        return self._intake.namespace(salt, prompt_version, kv)

    def codec(self, kv: str | None = None) -> Codec:
        """How KV is stored of requests with this `kv`: says which of `prefix` knows theirs.

        Raises:
            UsageError: there is no such codec.
        """
        return self._intake.codec(kv)

    def close(self) -> None:
        """Give back threads, buffers, the NPU and the pool; weights on the CPU go with the engine. Safe to call twice.

        Raises:
            UsageError: it was called from within a step, which still uses them.
        """
        self._guard.close()
        for request_id in list(self._streams):
            self.abort(request_id)
        if self.pressure is not None:
            self.pressure.close()
        self._parts.close()

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

    def _check_admissible(self) -> None:
        """Take no request when the engine is closed, or memory so short that those that run come first."""
        self._guard.check_open()
        if self.pressure is not None:
            self.pressure.check_admissible()
