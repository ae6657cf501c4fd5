"""What a model says of itself is text in every language that it is written in: YAML, Markdown, HTML, a Modelfile."""

from __future__ import annotations

import html
import re

import pytest
import yaml

from aprfmt.convert.modelfile import go_template, modelfile
from aprfmt.html.page import page, paragraph, table
from aprfmt.provenance.model_card import front_matter, markdown, to_card
from aprfmt.publishing.card import _SECTION, BEGIN, END, ModelRow, license_of, renewed
from aprfmt.tokenizer.chat_format import ChatFormat
from aprfmt.tokenizer.model import Tokenizer

markdown_it = pytest.importorskip("markdown_it")

HOSTILE = (
    "mit\n---\n# Owned\n",
    "mit\nbase_model: evil/model",
    "mit\r---\rtags: [x]",
    "&a [*a, *a]",
    "!!python/object/apply:os.system ['id']",
    "{a: b} # c",
    "'; \"",
    "</script><script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "<!-- apr: files --> <!-- apr: end -->",
    "[click](javascript:alert(1)) ![](https://example.invalid/pixel.png)",
    "`code` | cell | <b>\n\n| a | b |\n|---|---|",
    "# heading\n* item\n> quote\n===\n    code\n~~~",
    "&lt;img&gt; &#60;",
    '"""\nFROM evil\n"""',
    '"\nADAPTER /etc/passwd\n"',
    "\x1b[2J\u202egpj\u2066",
    "{{ .System }} {",
    "\\[a](b)",
)
ROW = ModelRow("m.gguf", "GGUF", "Q8_0", "llama", 10, 8.5, 100)


def kinds(text: str) -> set[str]:
    """The kinds of everything in a Markdown text that is more than text."""
    found = markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    inner = [token for block in found for token in (block, *(block.children or ()))]
    return {token.type.removesuffix("_open").removesuffix("_close") for token in inner} - {
        "inline",
        "text",
        "softbreak",
    }


@pytest.mark.parametrize("value", HOSTILE, ids=ascii)
def test_a_card_says_it_as_text(value: str) -> None:
    info = {"license": value, "name": value, "description": value, "data_source": value}
    card = to_card(info, {"tags": [value, value], "languages": [value]})
    assert card is not None
    stated = front_matter(card)
    fields = {
        "license",
        "language",
        "tags",
        "datasets",
        "data_source",
        *(f"model_{name}" for name in ("name", "description")),
    }
    assert stated.keys() <= fields
    assert stated["tags"] == [value.replace("\t", "  ")] * 2
    assert yaml.safe_load(card.decode().split("\n---\n")[0].removeprefix("---\n"))["license"] == value
    body = card.decode().split("\n---\n", 1)[1]
    assert kinds(body) <= {"heading", "paragraph"}
    assert kinds(body) - {"heading"} <= {"paragraph"}
    assert body.count("\n# ") == 1
    assert not re.search("[\x1b\u202e\u2066]", body)


@pytest.mark.parametrize("value", HOSTILE, ids=ascii)
@pytest.mark.parametrize("old", [b"# Mine\n", b"---\ntags:\n- mine\n---\n\n# Mine\n"])
def test_the_section_of_a_push_says_it_as_text(value: str, old: bytes) -> None:
    row = ModelRow(value, value, value, value, 10, 8.5, 100)
    info = {"license": value, "source": value, "data_source": value}
    card = renewed(old, [ROW, row], {"m.gguf": "00", value: "01"}, info, None)
    text = card.decode()
    assert [text.splitlines().count(mark) for mark in (BEGIN, END)] == [1, 1]
    assert f"{BEGIN}\n" + text.split(f"{BEGIN}\n")[1].removesuffix("\n") == _SECTION.findall(text)[0]
    assert license_of(card) == " ".join(re.sub("[\x1b\u202e\u2066]", " ", value).split())
    assert front_matter(card).keys() <= {"license", "tags"}
    body = text.split("\n---\n", 1)[1].replace(BEGIN, "").replace(END, "")
    assert kinds(body) <= {
        *("heading", "paragraph", "table", "thead", "tbody", "tr", "th", "td", "code_inline"),
        *("bullet_list", "list_item"),
    }
    assert kinds(renewed(card, [ROW], {}, info, None).decode()) <= {*kinds(text)}
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|-")]
    assert len(lines) == 6  # two tables, two rows each


@pytest.mark.parametrize("value", ["see https://a.example/?b=c", "WWW.a.example", "x (www.a.example) ftp://b"])
def test_a_bare_address_is_no_link(value: str) -> None:
    written = markdown(value)
    assert html.unescape(written) == value
    assert not re.search(r"://|www\.", written, re.IGNORECASE)


def commands(text: str) -> list[str]:
    """The commands of a Modelfile for Ollama, where a value ends with the line that closes its quotes."""
    found, buffer = [], ""
    for line in re.split("[\r\n]", text):
        if not buffer and (not line.strip() or line.startswith("#")):
            continue
        buffer += ("\n" if buffer else "") + line
        value = buffer.partition(" ")[2].strip().removeprefix("stop ")
        if value.startswith('"""') and not (len(value) >= 6 and value.endswith('"""')):
            continue
        if value.startswith('"') and not value.startswith('"""') and not (len(value) >= 2 and value.endswith('"')):
            continue
        found.append(buffer.partition(" ")[0])
        buffer = ""
    return found + ([f"unfinished {buffer!r}"] if buffer else [])


class Model:
    """What modelfile() asks of a model."""

    def __init__(self, value: str, template: str | None) -> None:
        self.info = {"license": value}
        self.tokenizer = Tokenizer("gpt2", ["<s>", value], special={"bos": 0, "eos": 1}, chat_template=template)
        self.hparams = type("Hparams", (), {"max_position_embeddings": None})


@pytest.mark.parametrize("value", HOSTILE, ids=ascii)
def test_a_modelfile_holds_no_other_command(value: str) -> None:
    quoted = value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    templates = (
        "{{ raise_exception('" + quoted + "') }}",
        "{% if messages[0].role != 'system' %}{{ '<s>" + quoted + "</s>\n' }}{% endif %}"
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<end>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}",
    )
    for template in templates:
        made, _ = modelfile(Model(value, template), "m.gguf")  # type: ignore[arg-type]
        assert set(commands(made.decode())) <= {"FROM", "TEMPLATE", "SYSTEM", "PARAMETER", "LICENSE"}
        assert commands(made.decode()).count("FROM") == 1
        assert not re.search("[\x1b\u202e]", made.decode())


def test_a_brace_at_the_end_of_a_text_begins_no_action() -> None:
    found = ChatFormat(start="{", system=("{", "{"), user=("a{", "b{{{"), assistant=("{", "{"), reply="{")
    text = re.sub(r'\{\{ "\{+" \}\}', "", go_template(found))
    assert not re.search(r"\{\{\{", text)
    assert text.count("{{") == text.count("}}")


@pytest.mark.parametrize("value", HOSTILE, ids=ascii)
def test_a_page_says_it_as_text(value: str) -> None:
    plain = page("", [paragraph("x"), table(["x"], [["x"]])])
    made = page(value, [paragraph(value), table([value], [[value], [(value, "bad")]])])
    tags = re.compile("<[/!a-z]+")
    assert set(tags.findall(made)) <= set(tags.findall(plain)) | {"<span", "</span"}
    assert made.count("<script") == 1
    assert not re.search("[\x1b\u202e]", made)
