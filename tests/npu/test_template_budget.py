"""Templates that would loop, grow or recurse without end: each ends soon, with an error, in bounded memory."""

from __future__ import annotations

import resource
import time

import pytest

from hostcache.errors import ModelError, UsageError
from npu import template_budget
from npu.chat import ChatTemplate
from npu.template_budget import CPU_SECONDS, STEP_LIMIT
from tests.npu.hostile_templates import GROWS, LOOPS, SLOW


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits a hundredth of what they are, so that what ends by them ends soon."""
    monkeypatch.setattr(template_budget, "STEP_LIMIT", STEP_LIMIT // 100)
    monkeypatch.setattr(template_budget, "CPU_SECONDS", 0.3)


def refused(source: str) -> str:
    start = time.thread_time()
    with pytest.raises((UsageError, ModelError)) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
    assert time.thread_time() - start < 3
    return str(caught.value)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("source", LOOPS)
def test_what_loops_without_end_is_ended(source: str) -> None:
    message = refused(source)
    assert f"more than {STEP_LIMIT // 100} steps" in message or "more than 0.3 seconds" in message


def test_the_true_limit_on_steps() -> None:
    assert f"more than {STEP_LIMIT} steps" in refused(LOOPS[0])


def test_the_true_limit_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(100))  # a processor on which each look at the clock takes a second
    monkeypatch.setattr(time, "thread_time", lambda: next(ticks))
    with pytest.raises(UsageError, match="more than 1 seconds"):
        ChatTemplate(LOOPS[0], {}).render([{"role": "user", "content": "hi"}])


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("source", GROWS)
def test_what_grows_without_end_is_refused_before_it_has_grown(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert any(word in refused(source) for word in ("size", "more than", "bits", "square", "closed", "digits"))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB
    assert grown < 512 << 10


@pytest.mark.parametrize("source", SLOW)
def test_what_is_slow_is_ended_or_not_begun(source: str) -> None:
    start = time.thread_time()
    with pytest.raises(UsageError, match=r"steps|seconds|size|characters"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])
    assert time.thread_time() - start < 2 * CPU_SECONDS


def test_searches_as_templates_need_them_are_let_through() -> None:
    answer = "x" * 500_000 + "</think> so "
    source = "{{ messages[0].content.rsplit('</think>', 1)[1].strip(' \n')|trim }}"
    assert ChatTemplate(source, {}).render([{"role": "user", "content": answer}]) == "so"


def test_renderings_of_one_conversation_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "STEP_LIMIT", 1000)
    template = ChatTemplate("{% for i in range(600) %}{% endfor %}", {})
    messages = [{"role": "user", "content": "hi"}]
    with template.one_budget():
        template.render(messages)
        with pytest.raises(UsageError, match="more than 1000 steps"):
            template.render(messages)
    assert template.render(messages) == ""


def test_compiling_takes_nothing_of_the_time_to_render(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_budget, "CPU_SECONDS", 0.05)
    template = ChatTemplate("{% if false %}" + "{{ a }}" * 8000 + "{% endif %}ok", {})  # takes 0.5 s to compile
    with template.one_budget():
        assert template.render([{"role": "user", "content": "hi"}]) == "ok"


@pytest.mark.usefixtures("short")
def test_the_budget_is_that_of_one_rendering() -> None:
    template = ChatTemplate("{% for i in range(3000) %}{% endfor %}{{ messages[0].content }}", {})
    for _ in range(3):  # together more than the limit
        assert template.render([{"role": "user", "content": "hi"}]) == "hi"


def test_a_long_conversation_is_far_from_the_limits() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' and not loop.last %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% endif %}{% set text = m.content | trim %}{{ text ~ '<|im_end|>' }}{% endfor %}"
    )
    messages = [{"role": ("user", "assistant")[turn % 2], "content": "word " * 100} for turn in range(2000)]
    rendered = ChatTemplate(source, {}).render(messages)
    assert rendered.count("<|im_end|>") == 2000
