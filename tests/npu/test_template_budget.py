"""Templates that would loop, grow or recurse without end: each ends soon, with an error, in bounded memory."""

from __future__ import annotations

import resource
import time

import pytest

from hostcache.errors import ModelError, UsageError
from npu import template_budget
from npu.chat import ChatTemplate
from npu.template_budget import CPU_SECONDS, STEP_LIMIT

R = "range(100000)"


def grow(first: str, step: str) -> str:
    """Put a value through the same step 99 times."""
    return f"{{% set ns = namespace(x={first}) %}}{{% for i in range(99) %}}{{% set ns.x = {step} %}}{{% endfor %}}"


LOOPS = [
    f"{{% for a in {R} %}}{{% for b in {R} %}}{{% endfor %}}{{% endfor %}}",
    f"{{% set r = {R}|list %}}{{% for a in r %}}{{% for b in r if false %}}{{% endfor %}}{{% endfor %}}",
    f"{{% for a in {R} %}}{{% for b in {R} if a == b and a != b %}}{{% endfor %}}{{% endfor %}}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "{% for a in [1, 2] recursive %}{% if loop.depth < 99 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    f"{{% for a in {R} %}}{{{{ {R}|map('string')|list|length }}}}{{% endfor %}}",
    f"{{% for a in {R} %}}{{{{ {R}|select('odd')|select('even')|first }}}}{{% endfor %}}",
    f"{{% set r = {R}|list %}}{{% for a in r %}}{{% if r == r|reverse|list %}}{{% endif %}}{{% endfor %}}",
    f"{{% set r = {R}|list %}}{{{{ r|select('in', r|reverse|list)|list|length }}}}",
    f"{{% set s = {R}|join %}}{{% for a in {R} %}}{{% if 'x' in s %}}{{% endif %}}{{% endfor %}}",
]

GROWS = [
    grow("'x'", "ns.x + ns.x"),
    grow("'x'", "ns.x ~ ns.x"),
    grow("[1]", "ns.x + ns.x"),
    grow("[1]", "[ns.x, ns.x]"),
    grow("[1]", "(ns.x, ns.x)"),
    grow("[1]", "{'a': ns.x, 'b': ns.x}"),
    grow("[1]", "dict(a=ns.x, b=ns.x)"),
    grow("9", "ns.x * ns.x"),
    grow("'xx'", "ns.x|replace('x', ns.x)"),
    grow("'xx'", "ns.x.replace('x', ns.x)"),
    grow("'xx'", "ns.x.join(ns.x)"),
    grow("'xx'", "ns.x|join(ns.x)"),
    grow("'x'", "'%s%s' % (ns.x, ns.x)"),
    grow("'{0}{0}'", "ns.x.format(ns.x)"),
    "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    "{% macro f(x, n) %}{% if n %}{{ f(x ~ x, n - 1) }}{% endif %}{{ x }}{% endmacro %}{{ f('x', 99) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%999999999d'|format(1) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 999999999) }}",
    "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "{{ 'x'.center(999999999) }}",
    "{{ 'x'.ljust(999999999) }}{{ 'x'.zfill(999999999) }}",
    "{{ 'x'|center(999999999) }}",
    "{{ 'x\n'|indent(999999999) }}",
    "{{ [1]|tojson(indent=999999999) }}",
    "{{ [1]|batch(999999999, 0)|first }}",
    "{{ 1|round(999999, 'ceil') }}",
    "{{ ('f' * 4000000)|int(base=16) }}",
    "{{ [[1]]|sum(start=[]) }}",
    "{{ 'a\tb'.expandtabs(999999999) }}",
    "{{ strftime_now('%c' * 100000) }}",
]


LETTERS = "{% set a = 'a' * 2000000 %}"
# Numbers whose hashes are all 0: Python's modulus is 2**61 - 1.
EQUAL_HASHES = (
    "{% set t %}{% for i in range(60000) %}{{ i * 2305843009213693951 }} {% endfor %}{% endset %}"
    "{% set n = t.split()|map('int')|list %}"
)
SLOW = [
    # What looks at every element, or compares all with all, before anybody can look at the clock.
    LETTERS + "{{ a|groupby('b') }}",
    LETTERS + "{{ a|groupby(a) }}",
    LETTERS + "{{ a|sort(attribute='b.c.d') }}",
    LETTERS + "{{ a|join(attribute='b') }}",
    LETTERS + "{{ a|unique|list }}",
    LETTERS + "{{ a|map(attribute=a)|list }}",
    LETTERS + "{{ a.rfind('ab' ~ 'a' * 900000) }}",
    LETTERS + "{{ a.rsplit(sep='ab' ~ 'a' * 900000) }}",
    LETTERS + "{{ a.rpartition('ab' ~ 'a' * 900000) }}",
    LETTERS + "{{ a.strip('b' * 900000 ~ 'a') }}",
    LETTERS + "{{ a|trim('b' * 900000 ~ 'a') }}",
    LETTERS + "{% for i in range(99999) %}{% set b = [a, i] %}{% endfor %}",
    EQUAL_HASHES + "{{ dict(n|batch(2)|list) }}",
    EQUAL_HASHES + "{{ n|unique|list }}",
    "{% set r = range(99999)|list %}{% for i in r %}{% set b = r + r %}{% endfor %}",
]


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
    """Without a limit each of them takes ten seconds to an hour."""
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
