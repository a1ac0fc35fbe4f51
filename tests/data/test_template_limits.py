"""A chat template that would not end is stopped by what it does, not by a clock."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from posttrain.data.render import template_limits
from posttrain.data.render.conversation import Conversation
from posttrain.data.render.renderer import Renderer, RenderError
from posttrain.data.render.template_limits import bounded_template
from posttrain.data.render.templates import BUILT_IN_FORMATS
from tests import tiny

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
LOOP = "{{% for i in {0} %}}{{% for j in {0} %}}{{% for k in {0} %}}x{{% endfor %}}{{% endfor %}}{{% endfor %}}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (LOOP.format("range(99999)"), "loops more than 10,000,000 times"),
        ("{% set r = range(9999) | list %}" + LOOP.format("r"), "loops more than 10,000,000 times"),
        ("{% set r = 'a' * 9999 %}" + LOOP.format("r"), "loops more than 10,000,000 times"),
        (
            "{% for i in range(99999) if i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "loops more",
        ),
        ("{{ 'a' * 10000000000 }}", "repeats something to more than 10,000,000"),
        ("{{ 10000000000 * [1] }}", "repeats something to more than 10,000,000"),
        ("{{ 9 ** (9 ** 9) }}", "computes a power"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    ],
    ids=["ranges", "lists", "texts", "filtered", "a long text", "a long list", "a power", "recursion", "a long range"],
)
def test_a_template_that_does_not_end_is_refused(template, reason):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = template + "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(RenderError, match=reason):
        Renderer(tokenizer).render(Conversation(CHAT))


@pytest.mark.parametrize("name", BUILT_IN_FORMATS)
def test_what_templates_write_is_what_transformers_writes(name):
    template = tiny.tokenizer(name).chat_template
    values = {"tools": None, "documents": None, "bos_token": "<s>", "eos_token": "</s>"}
    for begins in (False, True):
        ours = bounded_template(template).render(messages=CHAT, add_generation_prompt=begins, **values)
        theirs = render_jinja_template(
            [CHAT], chat_template=template, add_generation_prompt=begins, **{**values, "tools": None}
        )
        assert ours == theirs[0][0]


def test_loops_keep_their_variables_and_each_render_has_its_own_count(monkeypatch):
    monkeypatch.setattr(template_limits, "MAX_ITERATIONS", 5)
    template = template_limits.BoundedTemplate(
        "{% for m in messages | selectattr('n') %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
        "{% for x in nothing %}{% endfor %}{% for k, v in pairs.items() %} {{ k }}={{ v }}{% endfor %}"
    )
    for _ in range(3):
        assert template.render(messages=[{"n": 1}, {"n": 0}, {"n": 2}], pairs={"a": 1}) == "1/2,2/2 a=1"
    with pytest.raises(template_limits.TemplateLimit):
        template.render(messages=[{"n": 1}] * 6, pairs={})
