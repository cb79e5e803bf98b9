"""Chat templates that mean harm: each is refused, soon and in bounded memory."""

from __future__ import annotations

__all__ = ["ESCAPES", "GROWS", "LOOPS", "SLOW"]

ESCAPES = [
    "{{ ''.__class__ }}",
    "{{ messages['__class__'] }}",
    "{{ messages | attr('__init__') }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ raise_exception.__globals__ }}",
    # From public lists of template injections (PayloadsAllTheThings, HackTricks, the advisories of Jinja2).
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ ''|attr(['_' * 2, 'class', '_' * 2]|join) }}",
    "{{ self.__init__.__globals__.__builtins__ }}",
    "{{ self._TemplateReference__context.cycler.__init__.__globals__.os }}",
    "{{ joiner.__init__.__globals__.os }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.__class__ }}{{ dict.__base__.__subclasses__() }}",
    "{{ range.__class__.mro() }}",
    "{{ loop.__class__ }}{% for i in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__code__ }}",
    "{{ undefined_name.__init__.__globals__ }}",
    "{{ ().__class__.__bases__[0] }}",
    "{{ '%s'.format.__self__.__class__ }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "{{ ['{0.__class__}'.format]|map('string')|first }}{{ ([1]|map(attribute='__class__')|first).mro }}",
    "{{ [1]|map('attr', '__class__')|first }}",
    "{{ [1]|groupby('__class__')|list|string }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ namespace(__init__=1) }}",
    "{{ (1).real.__class__ }}",
    "{{ (messages|map(attribute='x'))|attr('gi_frame') }}",
    "{{ messages[0].setdefault('role', 1) }}{{ messages.clear() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ 'a' * 10000000000 }}",
    "{{ 10000000000 * [1] }}",
    "{{ 9 ** 999999999 }}",
    # Codecs are modules, which Python imports by the name it is given.
    "{{ 'x'.encode('idna') }}",
    "{{ (1).to_bytes(999999999, 'big') }}",
    "{{ messages[0].fromkeys([1]) }}",
]
"""They reach for what is no template's business."""

_R = "range(100000)"


def _grow(first: str, step: str) -> str:
    """Put a value through the same step 99 times."""
    return f"{{% set ns = namespace(x={first}) %}}{{% for i in range(99) %}}{{% set ns.x = {step} %}}{{% endfor %}}"


LOOPS = [
    f"{{% for a in {_R} %}}{{% for b in {_R} %}}{{% endfor %}}{{% endfor %}}",
    f"{{% set r = {_R}|list %}}{{% for a in r %}}{{% for b in r if false %}}{{% endfor %}}{{% endfor %}}",
    f"{{% for a in {_R} %}}{{% for b in {_R} if a == b and a != b %}}{{% endfor %}}{{% endfor %}}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "{% for a in [1, 2] recursive %}{% if loop.depth < 99 %}{{ loop([1, 2]) }}{% endif %}{% endfor %}",
    f"{{% for a in {_R} %}}{{{{ {_R}|map('string')|list|length }}}}{{% endfor %}}",
    f"{{% for a in {_R} %}}{{{{ {_R}|select('odd')|select('even')|first }}}}{{% endfor %}}",
    f"{{% set r = {_R}|list %}}{{% for a in r %}}{{% if r == r|reverse|list %}}{{% endif %}}{{% endfor %}}",
    f"{{% set r = {_R}|list %}}{{{{ r|select('in', r|reverse|list)|list|length }}}}",
    f"{{% set s = {_R}|join %}}{{% for a in {_R} %}}{{% if 'x' in s %}}{{% endif %}}{{% endfor %}}",
]
"""They loop without end."""

GROWS = [
    _grow("'x'", "ns.x + ns.x"),
    _grow("'x'", "ns.x ~ ns.x"),
    _grow("[1]", "ns.x + ns.x"),
    _grow("[1]", "[ns.x, ns.x]"),
    _grow("[1]", "(ns.x, ns.x)"),
    _grow("[1]", "{'a': ns.x, 'b': ns.x}"),
    _grow("[1]", "dict(a=ns.x, b=ns.x)"),
    _grow("9", "ns.x * ns.x"),
    _grow("'xx'", "ns.x|replace('x', ns.x)"),
    _grow("'xx'", "ns.x.replace('x', ns.x)"),
    _grow("'xx'", "ns.x.join(ns.x)"),
    _grow("'xx'", "ns.x|join(ns.x)"),
    _grow("'x'", "'%s%s' % (ns.x, ns.x)"),
    _grow("'{0}{0}'", "ns.x.format(ns.x)"),
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
"""They make values without bound."""


_LETTERS = "{% set a = 'a' * 2000000 %}"
# Numbers whose hashes are all 0: Python's modulus is 2**61 - 1.
_EQUAL_HASHES = (
    "{% set t %}{% for i in range(60000) %}{{ i * 2305843009213693951 }} {% endfor %}{% endset %}"
    "{% set n = t.split()|map('int')|list %}"
)
SLOW = [
    _LETTERS + "{{ a|groupby('b') }}",
    _LETTERS + "{{ a|groupby(a) }}",
    _LETTERS + "{{ a|sort(attribute='b.c.d') }}",
    _LETTERS + "{{ a|join(attribute='b') }}",
    _LETTERS + "{{ a|unique|list }}",
    _LETTERS + "{{ a|map(attribute=a)|list }}",
    _LETTERS + "{{ a.rfind('ab' ~ 'a' * 900000) }}",
    _LETTERS + "{{ a.rsplit(sep='ab' ~ 'a' * 900000) }}",
    _LETTERS + "{{ a.rpartition('ab' ~ 'a' * 900000) }}",
    _LETTERS + "{{ a.strip('b' * 900000 ~ 'a') }}",
    _LETTERS + "{{ a|trim('b' * 900000 ~ 'a') }}",
    _LETTERS + "{% for i in range(99999) %}{% set b = [a, i] %}{% endfor %}",
    _EQUAL_HASHES + "{{ dict(n|batch(2)|list) }}",
    _EQUAL_HASHES + "{{ n|unique|list }}",
    "{% set r = range(99999)|list %}{% for i in r %}{% set b = r + r %}{% endfor %}",
]
"""They look at every element of large values, or compare all with all: each would take ten seconds to an hour."""
