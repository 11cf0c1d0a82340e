"""A template that loops for ever or makes what fits no memory is refused; the bound is a count, and no
time.
"""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from agentrl.chat.codec import Codec, load_tokenizer
from agentrl.chat.template import ChatTemplate, TemplateRefusal, load_template
from agentrl.errors import ConfigError, DataError

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
    "integers": "{% set n = namespace(v=3) %}{% for i in range(60) %}{% set n.v = n.v * n.v %}{% endfor %}",
    "digits": "{{ (('f' * 9999999)|int(0, 16)) // 7 }}",
    "bytes": "{{ ('x'.encode() * 9999999999)|length }}",
    "format": "{{ '{:>999999999}'.format(1) }}",
    "format by argument": "{{ '{:>{}}'.format(1, 999999999) }}",
    "format of a mapping": "{{ '{a:>999999999}'.format_map({'a': 1}) }}",
    "percent by argument": "{{ '%*d' % (999999999, 1) }}",
    "format filter": "{{ '%999999999d'|format(1) }}",
    "many fields": "{{ ('%s' * 99999) % ((('x' * 99999),) * 99999) }}",
    "replaced": "{% set a = 'a' * 5000000 %}{{ a.replace('a', a)|length }}",
    "replaced by a filter": "{% set a = 'a' * 5000000 %}{{ a|replace('a', a)|length }}",
    "joined": "{% set a = 'a' * 5000000 %}{{ a.join(a)|length }}",
    "joined by a filter": "{% set a = 'a' * 5000000 %}{{ a|join(a)|length }}",
    "tabs": "{% set a = '\t' * 5000000 %}{{ a.expandtabs(5000000)|length }}",
    "translated": "{% set a = 'a' * 5000000 %}{{ a.translate({97: a})|length }}",
    "indented": "{% set a = '\n' * 5000000 %}{{ a|indent(a, blank=true)|length }}",
    "json": "{{ [[1, 2], [3, 4]]|tojson(indent=999999999) }}",
    "round": "{{ 1.5|round(999999999, 'ceil') }}",
    "output": "{% set b = 'x' * 5000000 %}{% for i in range(99999) %}{{ b }}{% endfor %}",
    "output in a macro": "{% set b = 'x' * 5000000 %}{% macro m() %}{% for i in range(99999) %}{{ b "
    "}}{% endfor "
    "%}{% endmacro %}{{ m()|length }}",
    "written text": "{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    "all that is created": "{% set n = namespace(v=[]) %}{% for i in range(999) %}{% set n.v = n.v + "
    "[(i ~ 'x') * "
    "999999] %}{% endfor %}",
    "shared lists": "{% set n = namespace(v=[1]) %}{% for i in range(60) %}{% set n.v = [n.v, n.v] %}{% "
    "endfor "
    "%}{{ n.v }}",
    "shared mappings": "{% set n = namespace(v=[1]) %}{% for i in range(60) %}{% set n.v = dict(a=n.v, "
    "b=n.v) %}{% "
    "endfor %}{{ n.v|tojson }}",
    "shared tuples": "{% set n = namespace(v=(1,)) %}{% for i in range(60) %}{% set n.v = (n.v, n.v) "
    "%}{% endfor "
    "%}{{ {n.v: 1}|length }}",
    "shared by a loop": "{% set n = namespace(v=[1]) %}{% for i in range(60) %}{% for x in "
    "[n.v]|batch(2, n.v) %}{% "
    "set n.v = x %}{% endfor %}{% endfor %}{{ n.v }}",
    "shared by a macro": "{% set n = namespace(v=[1]) %}{% macro m() %}{% set n.v = varargs %}{% "
    "endmacro %}{% for i "
    "in range(60) %}{{ m(n.v, n.v) }}{% endfor %}{{ n.v }}",
    "shared messages": "{{ messages * 9999999 }}",
}
DEEP = {
    "conditions": "{% if messages %}" * 3000 + "{% endif %}" * 3000,
    "loops": "{% for a in messages %}" * 30 + "{% endfor %}" * 30,
    "brackets": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "parentheses": "{{ " + "(" * 90_000 + "1" + ")" * 90_000 + " }}",
    "alternatives": "{% if 0 %}" + "{% elif 0 %}x" * 3000 + "{% endif %}",
    "filters": "{{ 1" + "|string" * 3000 + " }}",
    "a number": "{{ " + "9" * 100_000 + " }}",
    "a long text": "x" * 1_000_001,
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


@pytest.mark.parametrize("kind", DEEP)
def test_a_template_that_cannot_be_compiled_is_refused_in_one_line(kind):
    with pytest.raises(
        ConfigError, match=r"^the chat template (does not compile|has 1,000,0\d\d char)"
    ) as refusal:
        ChatTemplate({"default": DEEP[kind] + SAY}, {})
    assert "\n" not in str(refusal.value)


def test_a_file_that_is_nested_too_deep_is_refused(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="is not valid JSON"):
        load_template(tmp_path)


def replace(pattern, content):
    return normalizers.Replace(pattern, content)


@pytest.mark.parametrize(
    "grow",
    [
        lambda t: setattr(t, "normalizer", normalizers.Sequence([replace("a", "aa")] * 60)),
        lambda t: setattr(t, "normalizer", normalizers.Sequence([replace(Regex("(?=a)"), "a")] * 60)),
        lambda t: setattr(t, "normalizer", normalizers.Sequence([replace("a", "a" * 100_000)])),
        lambda t: setattr(t, "normalizer", normalizers.Prepend("a" * 100_000)),
        lambda t: setattr(
            t,
            "pre_tokenizer",
            pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False)] * 60),
        ),
        lambda t: setattr(t, "decoder", decoders.Sequence([decoders.Replace("a", "aa")] * 60)),
        lambda t: t.add_tokens(["a" * 100_000]),
    ],
)
def test_a_tokenizer_that_makes_very_much_of_a_text_is_refused_before_it_is_read(tmp_path, grow):
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode("a").ids == [0]
    grow(tokenizer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"tokenizer\.json: .*; at most ") as refusal:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_tokenizer_that_gives_up_on_a_text_fails_that_text_alone():
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    codec = Codec(tokenizer, template_text="", eos_token_ids=[1])
    with pytest.raises(DataError, match=r"the tokenizer fails on a text of 41 characters: .*retry-limit"):
        codec.encode("a" * 40 + "b")
    assert codec.encode("ab") == [0, 1]


def test_a_long_conversation_is_far_from_the_bound():
    template = ChatTemplate({"default": SAY}, {})
    messages = [{"role": "user", "content": "hi"}] * 20_000
    assert len(template.render(messages, add_generation_prompt=False)) == 40_000
