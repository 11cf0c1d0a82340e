"""A template that loops for ever or makes what fits no memory is refused; the bound is a count, and no
time.
"""

import pytest

from agentrl.chat.template import ChatTemplate, TemplateRefusal

SAY = "{% for m in messages %}{{ m.content }}{% endfor %}"
HOSTILE = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor "
    "%}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(9999) %}{% for b in range(9999) if false %}x{% endfor %}{% endfor "
    "%}",
    "recursive loops": "{% for a in range(99) recursive %}{{ loop(range(99)) }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "endless macro": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "times": "{{ ('x' * 9999999999)|length }}",
    "power": "{{ (7 ** 7 ** 7 ** 7 ** 7 ** 7)|string|length }}",
    "doubling": "{% set n = namespace(s='xxxxxxxxxx') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% "
    "endfor %}",
    "doubling by ~": "{% set n = namespace(s='xxxxxxxxxx') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s "
    "%}{% endfor %}",
    "a block": "{% set n = namespace(s='xx') %}{% for i in range(60) %}{% set n.s %}{{ n.s * 2 }}{% endset "
    "%}{% endfor %}",
    "width": "{{ 'x'|center(9999999999) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "method": "{{ 'x'.ljust(9999999999) }}",
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_template_is_refused(kind):
    template = ChatTemplate({"default": SAY}, {})
    assert template.render([{"role": "user", "content": "hi"}], add_generation_prompt=False) == "hi"
    hostile = ChatTemplate(
        {"default": "{% if messages[0].content == 'now' %}" + HOSTILE[kind] + "{% endif %}" + SAY}, {}
    )
    with pytest.raises(TemplateRefusal):
        hostile.render([{"role": "user", "content": "now"}], add_generation_prompt=False)


def test_a_long_conversation_is_far_from_the_bound():
    template = ChatTemplate({"default": SAY}, {})
    messages = [{"role": "user", "content": "hi"}] * 20_000
    assert len(template.render(messages, add_generation_prompt=False)) == 40_000
