"""Ollama's Modelfile beside a GGUF: its template gives what the model's own does, through what Go makes of it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

import aprfmt
from aprfmt.convert.modelfile import go_template
from aprfmt.convert.presets import quantized_name
from aprfmt.errors import AprError, UsageError
from aprfmt.tokenizer.chat_format import MAX_TEMPLATE, Conversation, find_format
from aprfmt.tokenizer.model import Tokenizer

_FIRST = "{{ bos_token }}{% for m in messages %}"
_REPLY = "{% endfor %}{% if add_generation_prompt %}"
TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    + _REPLY + "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "mistral": _FIRST + "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% else %}{{ raise_exception('no system') }}{% endif %}{% endfor %}",
    "phi3": _FIRST + "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}"
    + _REPLY + "{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "gemma": _FIRST + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}" + _REPLY + "{{ '<start_of_turn>model\n' }}{% endif %}",
    "llama3": _FIRST + "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}{{ m.content | trim }}"
    "{{ '<|eot_id|>' }}"
    "{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
    "llama2": "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.s = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}{% elif m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + ns.s + m.content + ' [/INST]' }}{% set ns.s = '' %}{% else %}"
    "{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}",
    "default": "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    + _REPLY + "{{ '<|im_start|>assistant\n' }}{% endif %}",
    "braces": "{% for m in messages %}{{ '{{' + m.role + '}}' + m.content + '\n' }}" + _REPLY + "{{ '>' }}{% endif %}",
}  # fmt: skip

NONE = {
    "numbers": ("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}", "differently"),
    "upper": ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "drops or repeats"),
    "twice": ("{% for m in messages %}{{ m.content + m.content }}{% endfor %}", "drops or repeats"),
    "broken": ("{% for m in", "cannot be rendered"),
    "unknown": ("{{ nothing.here }}", "cannot be rendered"),
    "outside": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot be rendered"),
    "endless": ("{% for i in range(10 ** 9) %}x{% endfor %}", "cannot be rendered"),
    "long": ("{#" + " " * MAX_TEMPLATE + "#}", "characters"),
}

TALKS: Sequence[tuple[str, ...]] = (("Hi",), ("Hi", "Yes?\n\nNo.", "Who?"), ("a", "b", "c {{ d }}", "e", "f"))


def tokenizer(template: str | None) -> Tokenizer:
    return Tokenizer("gpt2", ["<s>", "</s>"], special={"bos": 0, "eos": 1}, chat_template=template)


def talks(has_system: bool) -> list[Conversation]:
    roles = ("user", "assistant")
    plain = [[{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)] for turns in TALKS]
    return [*plain, *([{"role": "system", "content": "Be\nbrief."}, *talk] for talk in plain if has_system)]


def jinja(template: str, talk: Conversation) -> str:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(template)
    given = {"bos_token": "<s>", "eos_token": "</s>", "raise_exception": print}
    return made.render(messages=talk, add_generation_prompt=True, **given)


_ACTION = re.compile(r"\{\{ (.*?) \}\}", re.DOTALL)


def go(template: str, talk: Conversation) -> str:
    """What Go makes of a template of ours: its actions, one after the other, by their meaning in text/template."""
    texts = _ACTION.split(template.replace('{{ "{{" }}', "\0"))
    system = "\n\n".join(m["content"] for m in talk if m["role"] == "system")
    start, body = texts[0], texts[1:]
    assert body[0] == "range $i, $_ := .Messages"
    assert body[-2:] == ["end", ""]
    out = start
    for i, message in enumerate(talk):
        last = i == len(talk) - 1
        facts = {
            'eq .Role "user"': message["role"] == "user",
            'eq .Role "system"': message["role"] == "system",
            'eq .Role "assistant"': message["role"] == "assistant",
            "not $last": not last,
            'and $last (ne .Role "assistant")': last and message["role"] != "assistant",
            "and $.System (le $i 1)": bool(system) and i <= 1,
        }
        stack: list[tuple[bool, bool]] = []  # whether this branch is taken, whether one was
        out += body[1]
        for action, text in zip(body[2:-2:2], body[3:-2:2], strict=True):
            word, _, condition = action.partition(" ")
            if word == "if":
                stack.append((facts[condition], facts[condition]))
            elif word == "else":
                _, before = stack.pop()
                now = not before and facts[condition.removeprefix("if ")]
                stack.append((now, before or now))
            elif word == "end":
                stack.pop()
            elif action in (".Content", "$.System") and all(taken for taken, _ in stack):
                out += message["content"] if action == ".Content" else system
            out += text if all(taken for taken, _ in stack) else ""
        assert not stack
    return out.replace("\0", "{{")


@pytest.mark.parametrize("name", TEMPLATES)
def test_gos_template_gives_what_the_models_own_does(name: str) -> None:
    found, reason = find_format(tokenizer(TEMPLATES[name]))
    assert found is not None, reason
    assert (found.default == "Be good.") == (name == "default")
    template = go_template(found)
    for talk in talks(found.system is not None):
        stated = found.default and talk[0]["role"] != "system"
        whole = [{"role": "system", "content": "Be good."}, *talk] if stated else talk  # Ollama puts SYSTEM there
        assert go(template, whole) == jinja(TEMPLATES[name], talk).removeprefix("<s>" if name != "llama2" else "")


@pytest.mark.parametrize("name", NONE)
def test_what_no_fixed_texts_can_say_has_a_reason(name: str) -> None:
    template, said = NONE[name]
    found, reason = find_format(tokenizer(template))
    assert found is None
    assert said in reason


@pytest.mark.turns
@pytest.mark.parametrize("name", ["llama3", "gemma3", "qwen2_5", "qwen3"])
def test_real_templates(name: str, real_tokenizers: dict[str, Path]) -> None:
    from aprfmt.formats.hf_files import read_tokenizer

    found, reason = find_format(read_tokenizer(real_tokenizers[name]))
    assert found is not None, reason
    assert found.user[0].endswith("user<|end_header_id|>\n\n" if name == "llama3" else "user\n")


def test_beside_the_gguf(smollm2_short: Path, tmp_path: Path) -> None:
    report = aprfmt.export_model(smollm2_short, tmp_path / "m.gguf", modelfile=True)
    assert [Path(path).name for path in report.files] == ["m.gguf", "Modelfile"]
    assert (tmp_path / "m.gguf").read_bytes() == smollm2_short.read_bytes()
    text = (tmp_path / "Modelfile").read_text()
    assert text.startswith('FROM ./m.gguf\n\nTEMPLATE """{{ range')
    for line in (
        'SYSTEM "You are a helpful AI assistant named SmolLM, trained by Hugging Face"',
        'PARAMETER stop "<|im_end|>"',
        "PARAMETER num_ctx 8192",
        'LICENSE "apache-2.0"',
    ):
        assert f"{line}\n" in text
    with pytest.raises(AprError) as caught:
        aprfmt.export_model(smollm2_short, tmp_path / "n.gguf", modelfile=True)
    assert caught.value.code == "exists"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["Modelfile", "m.gguf"]


def test_a_template_that_ollama_has_to_know(smollm2_short: Path, tmp_path: Path) -> None:
    aprfmt.stamp(smollm2_short, tmp_path / "odd.gguf", set={"tokenizer.chat_template": NONE["numbers"][0]})
    report = aprfmt.export_model(tmp_path / "odd.gguf", tmp_path / "m.gguf", modelfile=True)
    assert any("Ollama must recognize the GGUF's template" in warning for warning in report.warnings)
    text = (tmp_path / "Modelfile").read_text()
    assert re.search("# No TEMPLATE: the template renders [36] conversations differently", text)
    assert "TEMPLATE " + '"""' not in text


def test_only_for_a_whole_gguf(smollm2_gguf: Path, tmp_path: Path) -> None:
    for name, size in (("m.apr", None), ("m.gguf", "20MB")):
        with pytest.raises(UsageError, match="modelfile"):
            aprfmt.convert_model(smollm2_gguf, tmp_path / name, modelfile=True, shard_size=size)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("source", "mix", "name"),
    [
        ("./Qwen3-0.6B", "q4_k_m", "Qwen3-0.6B-Q4_K_M.gguf"),
        ("/a/Qwen3-0.6B/", "q4_k", "Qwen3-0.6B-Q4_K_M.gguf"),
        ("Qwen3-0.6B-F16.gguf", "Q8_0", "Qwen3-0.6B-Q8_0.gguf"),
        ("m.Q4_K_M.gguf", "iq2_xxs", "m-IQ2_XXS.gguf"),
        ("m-bf16-00001-of-00003.gguf", "q6_k", "m-Q6_K.gguf"),
        ("hf://org/repo@main", "q5_k_m", "repo-Q5_K_M.gguf"),
        ("/a/TinyModel/model.safetensors", "q8_0", "TinyModel-Q8_0.gguf"),
        ("/a/Tiny/model.safetensors.index.json", "q8_0", "Tiny-Q8_0.gguf"),
        ("llama-2-7b.apr", "q4_0", "llama-2-7b-Q4_0.gguf"),
        ("smollm2-v1.5", "q4_0", "smollm2-v1.5-Q4_0.gguf"),
    ],
)
def test_names_of_quantized_files(source: str, mix: str, name: str) -> None:
    assert quantized_name(source, mix) == name


def test_quantize_names_its_output(smollm2_short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aprfmt.cli.main import run

    shutil.copy(smollm2_short, tmp_path / "SmolLM2.gguf")
    monkeypatch.chdir(tmp_path)
    assert run(["quantize", "SmolLM2.gguf", "q8_0", "--allow-requantize", "--plan", "-q"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["SmolLM2.gguf"]
    assert run(["quantize", "SmolLM2.gguf", "q8_0", "--allow-requantize", "-q"]) == 0
    assert (tmp_path / "SmolLM2-Q8_0.gguf").exists()
    assert run(["quantize", "SmolLM2.gguf", "q8_0", "--allow-requantize", "-q"]) == 5  # it exists
    assert run(["quantize", "SmolLM2.gguf", "q9", "-q"]) == 2


def test_a_name_tells_how_a_file_was_quantized() -> None:
    assert quantized_name("m.gguf", "q4_0", imatrix=True) == "m-Q4_0-imatrix.gguf"
    assert quantized_name("m.gguf", "q4_0", imatrix=True, pure=True) == "m-Q4_0-pure-imatrix.gguf"
