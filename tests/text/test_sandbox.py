"""Templates from strangers: what they may do, and that everything else is a TemplateError in finite time."""

import datetime
import re

import pytest

from inms_jax.errors import TemplateError
from inms_jax.text.chat import ChatTemplate, Message
from inms_jax.text.sandbox import CompiledTemplate


def render(source: str, **variables: object) -> str:
    return CompiledTemplate(source).render(variables)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__['os'] }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ range.__call__.__globals__['json'] }}",
        "{{ self.__init__.__globals__['sys'] }}",
        "{{ (messages|attr('__class__')).__base__ }}",
        "{% for i in range(10 ** 12) %}{% endfor %}",
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% for i in range(0, 10, 0) %}{% endfor %}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ 10 ** 12 * 'a' }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'a'|center(10 ** 10) }}",
        "{{ 'a'.ljust(10 ** 10) }}",
        "{{ lipsum(10 ** 10) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
        "{% import 'os' as os %}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{% for i in range(60000) %}{{ long }}{% endfor %}",
    ],
)
def test_hostile_and_broken_templates_raise(source: str) -> None:
    with pytest.raises(TemplateError, match="chat template"):
        render(source, messages=[], long="x" * 1000)


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'open", "{% nonsense %}", "{{ a|no_such_filter }}"])
def test_templates_that_do_not_parse_are_refused_at_once(source: str) -> None:
    with pytest.raises(TemplateError, match="does not parse"):
        CompiledTemplate(source)


def test_a_templates_own_refusal_is_passed_on() -> None:
    with pytest.raises(TemplateError, match="refuses these messages: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_messages_cannot_be_changed_from_inside() -> None:
    template = ChatTemplate("{% set _ = messages[0].update({'role': 'system'}) %}")
    with pytest.raises(TemplateError):
        template.render([Message("user", "hi")])


def test_helpers_that_templates_expect() -> None:
    value = {"b": "<é>", "a": [1, None]}
    assert render("{{ v|tojson }}", v=value) == '{"b": "<é>", "a": [1, null]}'
    assert render("{{ v|tojson(indent=2) }}", v={"a": 1}) == '{\n  "a": 1\n}'
    assert re.fullmatch(r"\d\d \w{3} \d{4}", render("{{ strftime_now('%d %b %Y') }}"))
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.date.today().year), str(datetime.date.today().year - 1)}
    skip = "{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}"
    assert render("{% for i in range(9) %}" + skip + "{{ i }}{% endfor %}") == "013"
    assert (
        render("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}")
        == "3"
    )
    assert render("{{ 7 % 2 }}{{ 'ab' * 2 }}{{ 2 ** 3 }}") == "1abab8"


def test_blocks_take_their_line_with_them() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"
