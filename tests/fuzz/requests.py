"""What callers hand to an engine: sampling parameters, prompts, conversations, with values of any type among them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hostcache.codec import CODECS
from hostcache.window import AttentionWindow
from npu.engine import Engine
from npu.sampler import SamplingParams
from npu.structured import Structure
from tests.fuzz.guard import Broken, refusals
from tests.fuzz.values import FLOATS, INTEGERS, TEXTS

__all__ = ["RequestCase", "request_cases", "serve"]

_STEPS = 3


@dataclass(frozen=True)
class RequestCase:
    """Arguments of `SamplingParams`, of `Engine.add_request`, and of `Engine.encode_chat`."""

    params: Mapping[str, Any]
    request: Mapping[str, Any]
    chat: Mapping[str, Any]


def serve(engine: Engine, case: RequestCase) -> None:
    """Ask for all of it, and compute what was accepted: what `step` raises comes from nobody's request.

    Raises:
        Broken: blocks are lost.
    """
    params: SamplingParams | None = None
    with refusals():
        params = SamplingParams(**case.params)
    with refusals():
        engine.encode_chat(**case.chat)
    with refusals():
        engine.score(case.request["prompt"])
    ids = []
    with refusals():
        ids.append(engine.add_request(**case.request, params=params))
    with refusals():
        ids.append(engine.add_request([5, 6, 7], params))
    for _ in range(_STEPS):
        engine.step()
    with refusals():
        ids.append(engine.fork(ids[-1] if ids else 0, params))
    engine.step()
    for request_id in ids:
        engine.abort(request_id)
    while not engine.idle:
        engine.step()
    if engine.cache.extents.used:
        raise Broken(f"{engine.cache.extents.used} extents are still in use")


_NUMBERS = st.one_of(INTEGERS, FLOATS, INTEGERS.map(Fraction), st.sampled_from(["NaN", "1e9999", "-0"]).map(Decimal))
_LISTS = st.lists(st.one_of(st.none(), st.booleans(), _NUMBERS, TEXTS), max_size=3)
_ARRAYS = st.sampled_from(
    [
        *(np.float32("nan"), np.int64(3), np.uint64(2**64 - 1), np.bool_(True), np.str_("a"), np.datetime64("2000")),
        *(np.zeros((2, 2), np.int32), np.array(5), np.zeros(0), np.zeros(3, np.float16), np.zeros(2, bool)),
        *(np.array([1, "a", None], object), np.array([2**63], np.uint64), np.zeros(2, "i4,f4"), np.zeros(1, "S3")),
    ]
)
_ODD = st.one_of(
    st.none(),
    st.booleans(),
    _NUMBERS,
    TEXTS,
    st.binary(max_size=3),
    _LISTS,
    _LISTS.map(tuple),
    _ARRAYS,
    st.dictionaries(st.one_of(INTEGERS, TEXTS), st.one_of(_NUMBERS, TEXTS), max_size=2),
    st.sampled_from([object(), int, 1j, ..., range(3), {1, 2}, [[1], [2, 3]], [[]], memoryview(b"ab")]),
)
_FEW = st.sampled_from([0, 1, 1, 2])

_PARAMS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2),
    "top_k": st.integers(0, 5),
    "top_p": st.floats(0.01, 1),
    "min_p": st.floats(0, 1),
    "typical_p": st.floats(0.01, 1),
    "repetition_penalty": st.floats(0.5, 2),
    "frequency_penalty": st.floats(-2, 2),
    "presence_penalty": st.floats(-2, 2),
    "logit_bias": st.dictionaries(st.integers(0, 400), st.floats(-100, 100), max_size=2),
    "structure": st.sampled_from([None, Structure.regex("a+"), Structure.choice(["yes", "no"]), Structure.lark("")]),
    "logprobs": st.none() | st.integers(0, 20),
    "seed": st.none() | st.integers(0, 2**64 - 1),
    "max_tokens": st.integers(1, 9),
    "stop": st.lists(TEXTS, max_size=2).map(tuple),
    "ignore_eos": st.booleans(),
}
_REQUEST: dict[str, st.SearchStrategy[Any]] = {
    "prompt": TEXTS | st.lists(st.integers(0, 271), min_size=1, max_size=20),
    "salt": TEXTS,
    "prompt_version": TEXTS,
    "kv": st.sampled_from([None, *CODECS]),
    "priority": st.integers(-3, 3),
    "client": TEXTS,
    "deadline": st.none() | st.floats(0, 1e9),
    "max_queue_seconds": st.none() | st.floats(0, 9),
    "overflow": st.sampled_from(["stop", "refuse", "slide"]),
    "window": st.none() | st.builds(AttentionWindow, st.integers(1, 40), st.integers(0, 20)),
}
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "tool", "root"]), "content": TEXTS | _ODD},
        optional={"name": _ODD, "tool_calls": _ODD, "reasoning": _ODD, "thinking": TEXTS},
    ),
    max_size=3,
)
_CHAT: dict[str, st.SearchStrategy[Any]] = {
    "messages": _MESSAGES,
    "add_generation_prompt": st.booleans(),
    "tools": st.none() | st.lists(st.dictionaries(TEXTS, TEXTS | _LISTS, max_size=2), max_size=2),
    "documents": st.none() | st.lists(st.dictionaries(TEXTS, TEXTS, max_size=2), max_size=2),
    "variables": st.none() | st.dictionaries(TEXTS, TEXTS | _NUMBERS, max_size=2),
}


@st.composite
def request_cases(draw: st.DrawFn) -> RequestCase:
    """Arguments of which a few are odd, and of the rest some are left out."""
    prompt = {"prompt": draw(_REQUEST["prompt"])}
    messages = {"messages": draw(_CHAT["messages"])}
    return RequestCase(
        _arguments(draw, _PARAMS),
        prompt | _arguments(draw, _REQUEST),
        messages | _arguments(draw, _CHAT),
    )


def _arguments(draw: st.DrawFn, kinds: Mapping[str, st.SearchStrategy[Any]]) -> dict[str, Any]:
    names = list(kinds)
    given = {name: draw(kinds[name]) for name in (draw(st.sampled_from(names)) for _ in range(draw(_FEW)))}
    return given | {name: draw(_ODD) for name in (draw(st.sampled_from(names)) for _ in range(draw(_FEW)))}
