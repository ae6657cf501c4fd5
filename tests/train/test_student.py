"""Students are what was asked for, with exactly the teacher's values, and a network that others can read."""

from __future__ import annotations

import json
from pathlib import Path

import arch_models
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from train_models import Maker, error, our_logits, same_winners

from aprfmt.arch.hparams import to_hf_config
from aprfmt.errors import AprError, NotFoundError, RefusedError, UnsupportedError, UsageError
from aprtrain.models import make_student, new_student
from aprtrain.network.decoder import Decoder
from aprtrain.network.weights import NetworkSource, fingerprint, load_decoder, open_network


def check_with_transformers(student: Decoder, network: NetworkSource, ids_NT: Tensor, folder: Path) -> None:
    """The student's config.json and tensors give transformers the same network."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf_config(network.hparams)))
    tensors = {name: tensor.clone() for name, tensor in student.hf_tensors().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    expected = torch.from_numpy(arch_models.transformers_logits(folder, ids_NT[0].tolist()))[None]
    logits = our_logits(student, ids_NT)
    assert error(logits, expected) < 1e-5
    assert same_winners(logits, expected)


LAYERS = {
    "layers:0,2,5": [0, 2, 5],
    "layers:3": [0, 2, 5],
    "layers:2": [0, 5],
    "layers:1": [0],
    "layers:4,": [4],
    "layers:6": [0, 1, 2, 3, 4, 5],
    "layers:5,1-2": [1, 2, 5],
}


@pytest.mark.parametrize("how", LAYERS)
def test_layers_are_the_teachers(how: str, tiny: Maker, tmp_path: Path) -> None:
    model = tiny("gemma3_text")
    stored = load_file(model.folder / "model.safetensors")
    with open_network(model.folder) as teacher:
        student = make_student(teacher, how)
        decoder = load_decoder(student)
        layer_types = teacher.hparams.extra["layer_types"]
        assert isinstance(layer_types, list)
        kinds = [layer_types[old] for old in LAYERS[how]]
        assert teacher.hparams.num_layers == 6
    assert student.shape.n_layers == student.hparams.num_layers == len(LAYERS[how])
    assert student.hparams.extra["layer_types"] == kinds
    for name, tensor in decoder.hf_tensors().items():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(LAYERS[how][int(parts[2])])
        assert torch.equal(tensor, stored[".".join(parts)]), name
    assert student.model is None
    assert student.tokenizer is not None
    check_with_transformers(decoder, student, model.ids_NT, tmp_path / "student")


def test_a_student_of_all_layers_is_the_teacher(tiny: Maker) -> None:
    with open_network(tiny("llama").folder) as teacher:
        student = make_student(teacher, "layers:2")
        decoder = load_decoder(student)
        assert fingerprint(student) == fingerprint(teacher)
        for name, tensor in load_decoder(teacher).hf_tensors().items():
            assert torch.equal(decoder.hf_tensors()[name], tensor), name
        assert student.shape == teacher.shape
        assert all(p.dtype == torch.float32 for p in decoder.parameters())


@pytest.mark.parametrize(
    ("case_id", "how"),
    [
        ("llama", "width:hidden=32,ffn=64,heads=2,kv_heads=1"),
        ("llama/biases", "width:heads=2,kv_heads=2"),
        ("qwen2", "width:heads=2,kv_heads=1,hidden=32"),
        ("qwen3/untied", "width:kv_heads=1,heads=2+layers:1"),
        ("gemma3_text", "layers:0,5+width:hidden=32"),
        ("phi3", "width:heads=2,kv_heads=1,ffn=64,hidden=32"),
        ("glm4", "width:heads=2,kv_heads=1,ffn=64,hidden=32"),
        ("olmo2", "width:ffn=64+layers:1"),
        ("arcee/biases", "width:heads=2,kv_heads=1,ffn=32"),
        ("starcoder2", "width:hidden=32,ffn=64"),
        ("cohere/qk_norm_few", "width:heads=2,kv_heads=1"),
        ("nemotron/bias", "width:hidden=32,ffn=64"),
        ("cohere2", "layers:0,3+width:heads=2,kv_heads=1"),
    ],
)
def test_a_narrow_student_is_a_network(case_id: str, how: str, tiny: Maker, tmp_path: Path) -> None:
    model = tiny(case_id)
    with open_network(model.folder) as teacher:
        student = make_student(teacher, how)
        decoder = load_decoder(student)
        assert student.shape != teacher.shape
        assert student.shape.head_dim == teacher.shape.head_dim
    check_with_transformers(decoder, student, model.ids_NT, tmp_path / "student")


@pytest.mark.parametrize("case_id", ["llama/biases", "llama/mha", "qwen3", "gemma2", "glm4"])
def test_what_the_teacher_does_not_use_is_what_goes(case_id: str, tiny: Maker, tmp_path: Path) -> None:
    """Neurons and heads whose output is multiplied with (nearly) nothing change no logit when they go."""
    model = tiny(case_id)
    folder = tmp_path / "teacher"
    folder.mkdir()
    for path in model.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    with open_network(model.folder) as network:
        s = network.shape
    unused = torch.randperm(s.d_ffn, generator=torch.Generator().manual_seed(4))[: s.d_ffn - 64]
    group = s.n_heads // s.n_kv_heads
    for n in range(s.n_layers):
        tensors[f"model.layers.{n}.mlp.down_proj.weight"][:, unused] = 0
        out = tensors[f"model.layers.{n}.self_attn.o_proj.weight"].view(s.d_model, s.n_heads, s.head_dim)
        gone = n % s.n_kv_heads
        out[:, gone * group : (gone + 1) * group] = 0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    heads, kv_heads = s.n_heads - group, s.n_kv_heads - 1
    with open_network(folder) as teacher:
        student = make_student(teacher, f"width:ffn=64,heads={heads},kv_heads={kv_heads}")
        decoder = load_decoder(student)
        expected = our_logits(load_decoder(teacher), model.ids_NT)
    assert (student.shape.d_ffn, student.shape.n_heads, student.shape.n_kv_heads) == (64, heads, kv_heads)
    assert error(our_logits(decoder, model.ids_NT), expected) < 1e-5


def test_channels_are_kept_by_the_size_of_their_embedding(tiny: Maker) -> None:
    with open_network(tiny("llama").folder) as teacher:
        decoder = load_decoder(make_student(teacher, "width:hidden=32"))
        stored = load_file(tiny("llama").folder / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    kept = embedding.norm(dim=0).argsort(descending=True)[:32].sort().values
    found = decoder.hf_tensors()
    assert torch.equal(found["model.embed_tokens.weight"], embedding[:, kept])
    out = "model.layers.1.self_attn.o_proj.weight"
    assert torch.equal(found[out], stored[out][kept])
    gate = "model.layers.1.mlp.gate_proj.weight"
    assert torch.equal(found[gate], stored[gate][:, kept])
    assert torch.equal(found["model.norm.weight"], stored["model.norm.weight"][kept])


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("layers:3", UsageError, "cannot select 3 layers: the teacher has 2"),
        ("layers:0", UsageError, "cannot select 0 layers"),
        ("layers:0,2", UsageError, "unknown layer 2"),
        ("layers:1-0", UsageError, "'1-0' is not a layer list"),
        ("layers:", UsageError, "'' is not a layer list"),
        ("layers:two", UsageError, "'two' is not a layer list"),
        ("width:depth=3", UsageError, "'depth=3'"),
        ("width:hidden=", UsageError, "'hidden='"),
        ("width:hidden=32,hidden=32", UsageError, "'hidden=32'"),
        ("width:hidden=40", UsageError, "not a multiple of 32"),
        ("width:ffn=128", UsageError, "the model's 96"),
        ("width:heads=3", UsageError, "3 heads cannot share 2"),
        ("width:kv_heads=1", UsageError, "4 heads cannot share 1"),
        ("layers:1+layers:1", UsageError, "twice"),
        ("nowhere/config.json", NotFoundError, "no such config.json"),
    ],
)
def test_what_cannot_be_made_is_refused(how: str, kind: type[AprError], words: str, tiny: Maker) -> None:
    with open_network(tiny("llama").folder) as teacher, pytest.raises(kind, match=words):
        make_student(teacher, how)


@pytest.mark.parametrize("case_id", ["deepseek_v3", "minimax_m2"])
def test_a_network_whose_routers_have_a_selection_bias_cannot_be_a_student(case_id: str, tiny: Maker) -> None:
    with open_network(tiny(case_id).folder) as teacher:
        for how in ("layers:1", str(tiny(case_id).folder)):
            with pytest.raises(UnsupportedError, match="supported as a teacher only"):
                make_student(teacher, how)


def test_heads_whose_size_a_config_cannot_say_are_refused(tiny: Maker) -> None:
    with open_network(tiny("phi3").folder) as teacher, pytest.raises(RefusedError, match="hidden / heads") as error:
        make_student(teacher, "width:heads=2,kv_heads=1")
    assert error.value.hint is not None
    assert "M = 16 N" in error.value.hint


def write_config(folder: Path, **config: object) -> Path:
    usual = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64, "vocab_size": 1024,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
        "tie_word_embeddings": True, "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**usual, **config}))
    return folder / "config.json"


def test_a_new_student_is_random_but_repeatable(tiny: Maker, tmp_path: Path) -> None:
    path = write_config(tmp_path / "config", initializer_range=0.05)
    with open_network(tiny("llama").folder) as teacher:
        network = make_student(teacher, str(path), seed=1)
        again = make_student(teacher, str(path.parent), seed=1)
        other = make_student(teacher, str(path), seed=2)
    assert fingerprint(network) == fingerprint(again) != fingerprint(other)
    a = load_decoder(network)
    assert network.arch.id == "qwen2"
    assert network.shape.vocab_rows == 1024
    deviations = {name: float(tensor.std()) for name, tensor in a.hf_tensors().items() if tensor.ndim > 1}
    small = 0.05 / 6**0.5
    for name, deviation in deviations.items():
        expected = small if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.05
        assert deviation == pytest.approx(expected, rel=0.05), name
    assert all(bool((tensor == 1).all()) for name, tensor in a.hf_tensors().items() if "norm" in name)
    assert not any(bool(tensor.any()) for name, tensor in a.hf_tensors().items() if name.endswith("bias"))
    check_with_transformers(a, network, tiny("llama").ids_NT, tmp_path / "student")


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tiny: Maker, tmp_path: Path) -> None:
    path = write_config(tmp_path / "config", vocab_size=999)
    with open_network(tiny("llama").folder) as teacher:
        with pytest.raises(RefusedError, match="1000 tokens, the config's vocab_size is 999"):
            make_student(teacher, str(path))
        student = new_student(path, None)
    assert student.shape.vocab_rows == 999


def test_a_config_of_a_network_that_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    path = write_config(tmp_path / "config", architectures=["OlmoForCausalLM"], model_type="olmo")
    with pytest.raises(UnsupportedError, match="'olmo'"):
        new_student(path, None)
