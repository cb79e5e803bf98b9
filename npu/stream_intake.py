"""What becomes a stream, and what is refused at the door."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from hostcache.codec import Codec, codec_named
from hostcache.errors import UsageError
from hostcache.prefix import Namespace
from hostcache.request import FinishReason
from hostcache.scheduler import Scheduler
from hostcache.window import AttentionWindow

from .overflow import ContextRules, OverflowPolicy
from .queue_options import QueueOptions
from .sampling_params import SamplingParams
from .sessions import KeptState
from .stream import Stream
from .structured import Constraint, StructureCompiler
from .token_ids import as_ids, prompt_ids
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["StreamIntake"]


class StreamIntake:
    """Queues an engine's prompts and forks: its `add_request`, `add_branches` and `fork`, which say more.

    Args:
        scheduler: where they are queued.
        tokenizer: text to ids and back.
        kept: brings back what is kept of a prompt.
        numerics: names everything of the model and its runtime that can change a bit of KV in a codec.
        rules: what a request gets of the context.
        codec: of requests that do not say.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        kept: KeptState,
        numerics: Callable[[Codec], str],
        rules: ContextRules,
        *,
        codec: Codec,
    ) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._kept = kept
        self._numerics = numerics
        self._rules = rules
        self._codec = codec
        self._structures = StructureCompiler(tokenizer)

    def open(
        self,
        prompt: str | ArrayLike,
        params: SamplingParams,
        *,
        salt: str = "",
        prompt_version: str = "",
        priority: int = 0,
        client: str = "",
        deadline: float | None = None,
        max_queue_seconds: float | None = None,
        overflow: OverflowPolicy = "stop",
        window: AttentionWindow | None = None,
        kv: str | None = None,
    ) -> Stream:
        """Queue a prompt; the keywords are `npu.queue_options.QueueOptions`.

        Raises:
            RockpageError: as `Engine.add_request`.
        """
        constraint = self._constraint(params)
        tokens = prompt_ids(prompt, self._tokenizer)
        namespace, codec = self.namespace(salt, prompt_version, kv), self.codec(kv)
        grant = self._rules.grant(overflow, tokens.size, params.max_tokens, window)
        if tokens.ndim == 1:
            self._kept.recall(namespace, tokens, codec)
        request = self._scheduler.submit(
            tokens,
            namespace,
            grant.max_tokens,
            priority=priority,
            client=client,
            deadline=deadline,
            max_queue_seconds=max_queue_seconds,
            window=grant.window,
            slide=grant.overflow == "slide",
            codec=codec,
        )
        return Stream(request, params, self._tokenizer, constraint=constraint, overflow=grant.overflow)

    def branches(
        self, prompt: str | ArrayLike, count: int, params: SamplingParams, **options: Unpack[QueueOptions]
    ) -> list[Stream]:
        """Queue several answers to one prompt.

        Raises:
            RockpageError: as `Engine.add_branches`.
        """
        if count < 1:
            raise UsageError(f"a prompt is answered at least once, not {count} times", count=count)
        constraints = [self._constraint(params) for _ in range(count - 1)]
        leader = self.open(prompt, params, **options)
        streams = [leader]
        try:
            for index, constraint in enumerate(constraints, 1):
                request = self._scheduler.branch(leader.request)
                seed = None if params.seed is None else (params.seed + index) % 2**64
                own = replace(params, seed=seed)
                streams.append(Stream(request, own, self._tokenizer, constraint=constraint, overflow=leader.overflow))
        except BaseException:  # too many wait: none of them is queued
            for stream in reversed(streams):
                self._scheduler.end(stream.request, FinishReason.ABORTED)
            raise
        return streams

    def fork(self, parent: Stream, params: SamplingParams | None) -> Stream:
        """Continue a running stream a second time; None samples as the parent does.

        Raises:
            RockpageError: as `Engine.fork`.
        """
        constraint = self._constraint(params or parent.params)
        request, granted = parent.request, None
        if params is not None:
            granted = self._rules.tokens(parent.overflow, request.prompt_length, params.max_tokens)
        return parent.fork(self._scheduler.fork(request, granted), self._tokenizer, params, constraint)

    def codec(self, kv: str | None) -> Codec:
        """The codec of that name; None: of requests that do not say.

        Raises:
            UsageError: there is none.
        """
        return self._codec if kv is None else codec_named(kv)

    def namespace(self, salt: str = "", prompt_version: str = "", kv: str | None = None) -> Namespace:
        """What requests with this salt, version and codec share KV in.

        Raises:
            UsageError: there is no such codec.
        """
        return Namespace(self._numerics(self.codec(kv)), salt=salt, prompt_version=prompt_version)

    def _constraint(self, params: SamplingParams) -> Constraint | None:
        """Refuse what cannot be sampled with this model before anything is queued; the constraint of one request."""
        as_ids(list(params.logit_bias), self._tokenizer.vocab_size)
        return self._structures.constraint(params.structure) if params.structure else None
