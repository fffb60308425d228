"""What makes much out of little is refused: the smallest bound, so that what is not refused does no harm here."""

from __future__ import annotations

from datetime import datetime

import pytest

from tokenflow.chat.template import ChatTemplate, TemplateError
from tokenflow.errors import InvalidRequest

MOST = 1000

BEGIN = "{% set b = 'a' * 900 %}{% set ns = namespace(s='ab', l=[1], t=(1,), m='ab'|safe, n=3) %}"
"""A text that is nearly as long as it may be, and what grows in a loop."""

GROWING = [
    "{% set ns.s = ns.s + ns.s %}",
    "{% set ns.s = 'a' + b + ns.s %}",
    "{% set ns.m = ns.m + ns.m %}",
    "{% set ns.l = ns.l + ns.l %}",
    "{% set ns.t = ns.t + ns.t %}",
    "{% set ns.l = ns.l * 2 %}",
    "{% set ns.s = ns.s ~ ns.s %}",
    "{% set ns.s = '%s%s' % (ns.s, ns.s) %}",
    "{% set ns.s = '%(a)s%(a)s' % {'a': ns.s} %}",
    "{% set ns.s = '%(a)s%(a)s'|format(a=ns.s) %}",
    "{% set ns.s = '{0}{0}'.format(ns.s) %}",
    "{% set ns.s = ('{a}{a}'|safe).format_map({'a': ns.s}) %}",
    "{% set ns.s = ns.s|replace('a', 'aa') %}",
    "{% set ns.s = ns.s.replace('a', 'aa') %}",
    "{% set ns.s = [ns.s, ns.s]|join %}",
    "{% set ns.s = ','.join([ns.s, ns.s]) %}",
    "{% set ns.s = ns.s|tojson %}",
    "{% set ns.s = (ns.s ~ '&&&')|forceescape %}",
    "{% set ns.s = (ns.s ~ 'a')|indent(ns.s, first=true) %}",
    "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}",
    "{% set ns.s %}{% filter upper %}{{ ns.s }}{{ ns.s }}{% endfilter %}{% endset %}",
    "{% macro twice(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns.s = twice(ns.s) %}",
    "{% autoescape true %}{% set ns.m = ns.m ~ ns.m %}{% endautoescape %}",
]

AT_ONCE = [
    "{{ b * 2 }}",
    "{{ [b, b]|join }}",
    "{{ 'ab'|join(b) }}",
    "{{ b.join('abc') }}",
    "{{ [{'a': b}, {'a': b}]|join(attribute='a') }}",
    "{{ 'aa'|replace('a', b) }}",
    "{{ 'a'|replace('', b) }}",
    "{{ 'aa'.replace('a', b) }}",
    "{{ ['aa']|map('replace', 'a', b)|list }}",
    "{{ 'a\na\na\n'|indent(b) }}",
    "{{ 'a\na'|indent(1001) }}",
    "{{ 'a'.ljust(1001) }}",
    "{{ [b, b] }}",
    "{{ [b, b] ~ '' }}",
    "{{ [b, b]|string }}",
    "{{ [b, b]|upper }}",
    "{{ [b, b]|trim }}",
    "{{ [b, b]|replace('a', 'b') }}",
    "{{ [b, b]|tojson }}",
    "{{ {'a': {'b': [b, b]}}|tojson }}",
    "{{ [[[[[[[[1, 2, 3, 4, 5, 6, 7, 8, 9]]]]]]]]|tojson(indent=16) }}",
    "{{ dict(a=b, b=b).values() }}",
    "{{ '%s' % [b, b] }}",
    "{{ '%s%s'|format(b, b) }}",
    "{{ '{}'.format([b, b]) }}",
    "{{ '{!r}'.format([b, b]) }}",
    "{{ raise_exception([b, b]) }}",
]

TOO_LARGE = {
    "{{ '%100000d'|format(1) }}": "too wide",
    "{{ '{:100000}'.format(1) }}": "too wide",
    "{{ '{a:{w}}'.format_map({'w': 100000, 'a': 1}) }}": "too wide",
    "{% for i in range(20) %}{% set ns.n = ns.n * ns.n %}{% endfor %}": "a product is too large",
    "{{ 5|round(-10000) }}": "a precision is too large",
    "{{ [[1], [2]]|sum(start=[]) }}": "sum is of numbers",
    "{{ strftime_now('%c' * 200) }}": "format is too long",
    "{{ [1]|tojson(separators=('a' * 100, ':')) }}": "at most 16",
    "{{ '\t'.expandtabs(1000) }}": "'expandtabs' of 'str' object is unsafe",
    "{{ b.translate({97: b}) }}": "'translate' of 'str' object is unsafe",
    "{{ b.encode() }}": "'encode' of 'str' object is unsafe",
    "{{ (1).to_bytes(1000, 'big') }}": "'to_bytes' of 'int' object is unsafe",
    "{{ ns }}": "a namespace is no text",
}


def refusal(source: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(BEGIN + source, max_chars=MOST).render([], now=datetime(2026, 2, 3))
    return caught.value.message


@pytest.mark.parametrize("body", GROWING)
def test_what_grows(body: str) -> None:
    source = f"{{% for i in range(18) %}}{body}{{% endfor %}}"
    assert "SecurityError: it builds more than 1000 characters" in refusal(source)


@pytest.mark.parametrize("source", AT_ONCE)
def test_what_is_much_at_once(source: str) -> None:
    assert "SecurityError: it builds more than 1000 characters" in refusal(source)


@pytest.mark.parametrize("source", TOO_LARGE)
def test_what_is_too_large(source: str) -> None:
    message = refusal(source)
    assert "SecurityError: " in message
    assert TOO_LARGE[source] in message


def test_one_list_many_times_over() -> None:
    """Its text would be two to the power of that."""
    source = "{% for i in range(20) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}"
    for end in ("{{ ns.l }}", "{{ ns.l|tojson }}", "{{ {}[ns.l] + 1 }}"):
        assert len(refusal(source + end)) < 300


@pytest.mark.parametrize("name", ["batch", "center", "pprint", "slice", "urlencode", "urlize", "wordwrap", "xmlattr"])
def test_filters_that_no_prompt_needs(name: str) -> None:
    with pytest.raises(TemplateError, match=f"No filter named '{name}'"):
        ChatTemplate(f"{{{{ 'a'|{name} }}}}")


HARMLESS = {
    "{{ 1700000000|string ~ 2 ~ none ~ [1, 'a'] }}": "17000000002None[1, 'a']",
    "{{ 1700000000|int + 1 }}{{ 1.256|round(2) }}{{ [1, 2]|sum }}{{ [{'a': 1}]|sum('a') }}": "17000000011.2631",
    "{{ '%s-%05.1f%%' % ('a', 2.25) }}{{ '%(a)s'|format(a=1) }}{{ '{} {a!r:>4}'.format(1, a='b') }}": "a-002.2%11  'b'",
    "{{ 'aXbX'.replace('X', '--') }}{{ 'aXbX'|replace('X', '-', 1) }}{{ 'ab'.replace('', '.') }}": "a--b--a-bX.a.b.",
    "{{ (b|replace('a', 'b' * 99, 1))|length }}": "998",
    "{{ ', '.join(['a', 'b']) }}{{ [1, none]|join('+') }}{{ [{'a': 1}]|join(attribute='a') }}": "a, b1+None1",
    "{{ 'a\nb'|indent(2) }}{{ 'a'|indent('> ', true) }}": "a\n  b> a",
    "{{ {'a': [1, 2]}|tojson(indent=1) }}{{ [1, {'a': 2}]|tojson(separators=(',', ':')) }}": (
        '{\n "a": [\n  1,\n  2\n ]\n}[1,{"a":2}]'
    ),
    "{% set x %}{{ 'a' }}{{ 1 }}{% endset %}{{ x }}{{ nothing }}{{ nothing ~ 'b' }}": "a1b",
    "{{ ns.translate is defined }}{{ {'encode': 1}.encode }}{{ 'a'|safe ~ '<' }}": "False1a<",
}


@pytest.mark.parametrize("source", HARMLESS)
def test_what_is_harmless_goes_as_everywhere(source: str) -> None:
    assert ChatTemplate(BEGIN + source, max_chars=MOST).render([])[0].text == HARMLESS[source]


def test_join_of_a_text_takes_texts_only() -> None:
    assert "TypeError: join takes strings, and not int" in refusal("{{ ''.join([1]) }}")


def test_what_is_not_there_is_named() -> None:
    assert "has no element 3" in refusal("{{ [1][3].a }}")
