"""Chat templates: rendered as transformers does, in a sandbox, with errors that name the line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aprfmt.errors import AprError, LimitError, MissingDependencyError, RefusedError, UnsupportedError
from aprfmt.io.child import Service
from aprfmt.tokenizer import chat
from aprfmt.tokenizer.chat import ChatTemplate

HELLO = [{"role": "user", "content": "Hi"}]
TALK = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "  Grüße, 世界  "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."},
    {"role": "user", "content": "{{ 1 + 1 }}?"},
]

FORMS = {
    "trimmed blocks": "{% for m in messages %}\n  {{ m.content }}\n  {% endfor %}\n.",
    "json": "{{ messages | tojson }} {{ messages | tojson(indent=2) }}"
    " {{ {'b': 1, 'a': '<'} | tojson(sort_keys=true) }}",
    "namespace": "{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}",
    "loop controls": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endif %}{% endfor %}",
    "tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    "none": "{% if tools is none and documents is none %}no tools{% endif %}",
    "date": "{{ strftime_now('%Y') | length }}",
    "prompt": "{{ messages[-1].content }}{% if add_generation_prompt %}>{% else %}.{% endif %}",
    "methods": "{{ messages[1].content.strip().split(',')[0].upper() }}",
    "formats": "{{ '%02d' % 7 }}{{ 7 % 4 }}{{ '-' * 3 }}{{ 2 ** 5 }}",
}


def peer(template: str, messages: Any, **options: Any) -> str:
    """What transformers makes of it."""
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, _ = render_jinja_template([messages], chat_template=template, **options)
    return str(texts[0])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("reply", [True, False])
def test_it_renders_as_transformers_does(name: str, reply: bool) -> None:
    wanted = peer(FORMS[name], TALK, bos_token="<s>", eos_token="</s>", add_generation_prompt=reply)
    found = ChatTemplate(FORMS[name], {"bos": "<s>", "eos": "</s>"}).render(TALK, add_generation_prompt=reply)
    assert found == wanted


def test_real_templates(real_tokenizers: dict[str, Path]) -> None:
    seen = 0
    for folder in real_tokenizers.values():
        config = json.loads((folder / "tokenizer_config.json").read_text())
        if not isinstance(source := config.get("chat_template"), str):
            continue
        seen += 1
        bos = config.get("bos_token") or ""
        bos = bos["content"] if isinstance(bos, dict) else bos
        for messages in (TALK, TALK[1:], HELLO):
            wanted = peer(source, messages, bos_token=bos, add_generation_prompt=True)
            assert ChatTemplate(source, {"bos": bos}).render(messages) == wanted
    assert seen >= 3


def test_variables_reach_the_template() -> None:
    source = "{{ messages[0].content }}{% if enable_thinking %}yes{% else %}no{% endif %}"
    assert ChatTemplate(source).render(HELLO, enable_thinking=True) == "Hiyes"
    assert ChatTemplate(source).render(HELLO) == "Hino"


def test_content_in_parts() -> None:
    """Templates of models that see look for the text in a list."""
    source = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(source + "|{% endfor %}").render(TALK[1:2]) == "  Grüße, 世界  |"
    broken = "{{ 'x' if messages[0].content is string else raise_exception('no') }}"
    assert ChatTemplate(broken).render(HELLO) == "x"


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("a\n{% for %}", UnsupportedError, "at line 2"),
        ("a\n\n{{ raise_exception('no system message') }}", RefusedError, "no system message at line 3"),
        ("\n{{ 1 / 0 }}", UnsupportedError, "division by zero at line 2"),
        ("{{ nothing.here }}", UnsupportedError, "'nothing' is undefined at line 1"),
        ("{{ messages.append(1) }}", UnsupportedError, "unsafe"),
        ("{{ ''.__class__.__mro__ }}", UnsupportedError, "unsafe"),
        ("{% include 'x' %}", UnsupportedError, "cannot be rendered"),
        ("{{ 'a' * 100000000 }}", LimitError, "takes more than 192 MiB of memory"),
        ("{{ [1] * 100000000 }}", LimitError, "takes more than 192 MiB of memory"),
        ("{{ '%999999999d' % 1 }}", LimitError, "takes more than 192 MiB of memory"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", UnsupportedError, "Range too big"),
        (
            "{% set n = namespace(v='abcd') %}{% for i in range(24) %}{{ n.v }}{% set n.v = n.v + n.v %}{% endfor %}",
            LimitError,
            "characters",
        ),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", UnsupportedError, "recursion"),
    ],
)
def test_templates_that_fail(source: str, kind: type[AprError], message: str) -> None:
    with pytest.raises(kind) as caught:
        ChatTemplate(source, name="the template", path="m.gguf").render(HELLO)
    assert message in caught.value.message
    assert str(caught.value).startswith(("m.gguf: the template", "m.gguf: rendering the template"))


def test_without_jinja2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "jinja2.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    chat._service.close()
    with pytest.raises(MissingDependencyError, match="jinja2"):
        ChatTemplate("x").render(HELLO)
    chat._service.close()


def test_the_parent_does_not_import_jinja2() -> None:
    code = (
        "import sys\nfrom aprfmt.tokenizer.chat import ChatTemplate\nprint(ChatTemplate('x').render([]), *sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert out[0] == "x"
    assert "jinja2" not in out


def test_many_slow_conversations_end_as_one_endless_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service("aprfmt.tokenizer.rendering", seconds=0.4, memory=1 << 28, most_bytes=1 << 20)
    monkeypatch.setattr(chat, "_service", service)
    template = ChatTemplate("{% for i in range(999) %}{% for j in range(999) %}{% endfor %}{% endfor %}")

    def many() -> None:
        for _ in range(500):
            template.render(HELLO)

    with pytest.raises(LimitError, match="the chat template takes more than"):
        many()
    assert ChatTemplate("x").render(HELLO) == "x"  # by another process
    service.close()


def test_a_conversation_goes_through_as_it_is() -> None:
    text = "\ud800 \x00 \u2028 \U0001f600 \r\n"
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": text}]) == text


def test_a_template_is_limited_in_length() -> None:
    with pytest.raises(LimitError, match="has 1,048,577 characters"):
        ChatTemplate("x" * ((1 << 20) + 1)).render(HELLO)
