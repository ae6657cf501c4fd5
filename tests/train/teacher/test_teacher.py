"""A teacher computes the same wherever its weights live, holds no more than it must, or is refused."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train_quantized as made
from llama_peer import LlamaPeer
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from train_blocks import resident_bytes
from train_models import Maker, our_logits
from train_quantized import LAYERS, MIX, VOCAB, D, write_gguf

import aprfmt
from aprfmt.errors import CorruptError, RefusedError
from aprfmt.tokenizer.alignment import SharedVocabulary
from aprtrain.features import TABLE, recording
from aprtrain.kernels import blocks as kernel
from aprtrain.kernels.fp8 import Fp8Weight
from aprtrain.network.attention import Documents
from aprtrain.network.weights import load_decoder, open_network
from aprtrain.teacher import teacher as module
from aprtrain.teacher.teacher import RESIDENCIES, BlocksDecoder, Teacher, estimate_bytes, note_decoded, residency_of

VOCABULARY = SharedVocabulary(300, VOCAB, VOCAB)


def tokens(seed: int, n: int = 2, t: int = 24) -> Tensor:
    return torch.randint(0, 300, (n, t), generator=torch.Generator().manual_seed(seed))


SAMPLE = tokens(9, 4, 64)


def teacher(path: Path, residency: str = "q4k", **options: Any) -> Teacher:
    if residency == "fp8":
        options = {"sample_NT": SAMPLE} | options
    with open_network(path) as network:
        return Teacher(network, VOCABULARY, residency, "cpu", **options)


@pytest.fixture(autouse=True)
def _random_weights_have_no_clear_first_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_AGREEMENT", 0.9)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("teacher") / "mixed.gguf")


@pytest.mark.parametrize(
    ("types", "tied"),
    [
        (MIX, False),
        (MIX | {"token_embd": "Q6_K"}, True),
        (dict.fromkeys([*MIX, "token_embd"], "Q8_0"), False),
        (MIX | {"attn_v": "Q5_0", "token_embd": "F16", "output": "BF16"}, False),
    ],
    ids=["Q4_K_M", "tied", "Q8_0", "others"],
)
def test_blocks_give_what_bf16_gives_bit_by_bit(types: dict[str, str], tied: bool, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", types, tied=tied)
    kept, plain = teacher(path), teacher(path, "bf16")
    with open_network(path) as network:
        loaded = load_decoder(network, torch.bfloat16)
    documents = Documents.of([24, 5, 19], 24)
    for batch, ends in ((tokens(1), None), (tokens(2), documents), (tokens(1), None)):
        want = plain.hidden(batch, ends)
        assert bool(torch.isfinite(want).all())
        assert torch.equal(kept.hidden(batch, ends), want)
        with torch.no_grad():
            assert torch.equal(loaded(batch, ends), want)
    assert torch.equal(kept.head_weight, plain.head_weight)
    assert torch.equal(our_logits(kept.decoder, tokens(3)), our_logits(plain.decoder, tokens(3)))


@pytest.mark.parametrize(
    ("types", "residency"),
    [
        (MIX, "q4k"),
        (dict.fromkeys([*MIX, "token_embd"], "Q8_0"), "q4k"),
        (dict.fromkeys([*MIX, "token_embd"], "F16"), "bf16"),
        (dict.fromkeys([*MIX, "token_embd"], "Q5_0"), "bf16"),
        (dict.fromkeys([*MIX, "token_embd"], "F16") | {"ffn_down": "Q4_K"}, "bf16"),
    ],
)
def test_a_teacher_stays_what_most_of_its_file_is(types: dict[str, str], residency: str, tmp_path: Path) -> None:
    with open_network(write_gguf(tmp_path / "t.gguf", types)) as network:
        assert residency_of(network) == residency


@pytest.mark.parametrize(
    ("types", "asked", "noted"),
    [
        (MIX, True, ("Q4_K", "leave out --teacher-residency")),
        (MIX, False, None),
        (dict.fromkeys([*MIX, "token_embd"], "Q5_0"), True, ("Q5_0", TABLE["blocks"].mend)),
        (dict.fromkeys([*MIX, "token_embd"], "Q5_0"), False, ("Q5_0", TABLE["blocks"].mend)),
        (dict.fromkeys([*MIX, "token_embd"], "F16"), True, None),
    ],
)
def test_quantized_matrices_that_become_bf16_are_noted(
    types: dict[str, str], asked: bool, noted: tuple[str, str] | None, tmp_path: Path
) -> None:
    with open_network(write_gguf(tmp_path / "t.gguf", types)) as network, recording() as record:
        note_decoded(network, asked=asked)
    if noted is None:
        assert record.missed == []
        return
    (miss,) = record.missed
    assert noted[0] in miss.reason.partition(" of the teacher are converted to bf16: ")[0]
    assert (miss.feature, miss.mend) == ("blocks", noted[1])


def test_an_apr_keeps_the_same_blocks(tmp_path: Path) -> None:
    path, made_of_it = write_gguf(tmp_path / "t.gguf", MIX | {"ffn_down": "Q8_0"}), tmp_path / "t.apr"
    aprfmt.import_model(path, made_of_it)
    one, other = teacher(path), teacher(made_of_it)
    assert other.notes == []
    assert resident_bytes(other.decoder) == resident_bytes(one.decoder)
    assert torch.equal(other.hidden(tokens(1)), one.hidden(tokens(1)))


def test_every_matrix_is_decoded_for_its_own_layer(mixed: Path) -> None:
    kept = teacher(mixed)
    assert isinstance(kept.decoder, BlocksDecoder)
    before = kept.hidden(tokens(1))
    for name, parts in kept.decoder.stored.items():
        part = parts[-1].stored_B
        changed = part.clone()
        part[-16:] ^= 1
        after = kept.hidden(tokens(1))
        assert torch.equal(after, before) is (name == "head" or name == "embed"), name
        part.copy_(changed)
    assert torch.equal(kept.hidden(tokens(1)), before)


def test_the_head_has_the_shared_rows_only(mixed: Path) -> None:
    for residency in ("bf16", "q4k"):
        one = teacher(mixed, residency)
        full = one.decoder.head_weight
        assert full.shape == (VOCAB, D)
        for n_real, rows in ((300, 320), (200, 256), (64, 64)):
            one.vocabulary = replace(VOCABULARY, n_real=n_real)
            assert torch.equal(one.head_weight, full[:rows])


class _Wide(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects float32 tensors of at least `n` values that any operation sees or makes."""

    def __init__(self, n: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.n = n
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in (*args, result):
            if isinstance(value, Tensor) and value.dtype == torch.float32 and value.numel() >= self.n:
                self.found.append(str(func))
        return result


@pytest.mark.parametrize("residency", ["bf16", "q4k"])
def test_no_matrix_is_ever_float32(mixed: Path, residency: str, monkeypatch: pytest.MonkeyPatch) -> None:
    smallest = D * D // 2
    monkeypatch.setattr(kernel, "_PIECE", 4096)
    with _Wide(smallest) as seen:
        one = teacher(mixed, residency)
        one.hidden(tokens(1, 1, 16))
        assert one.head_weight.dtype == torch.bfloat16
    assert seen.found == []
    with _Wide(smallest) as seen:
        torch.zeros(smallest, dtype=torch.bfloat16).float()
    assert seen.found


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_resident_bytes_are_those_of_the_plan(mixed: Path, residency: str) -> None:
    one = teacher(mixed, residency)
    with open_network(mixed) as network:
        assert resident_bytes(one.decoder) == estimate_bytes(network, residency)


def test_blocks_are_held_as_they_are_stored(mixed: Path) -> None:
    one = teacher(mixed)
    with open_network(mixed) as network:
        stored = sum(tensor.n_bytes for tensor in network.tensors.values())
        scratch = 2 * network.shape.n_layer_params
        norms = sum(tensor.n_bytes for tensor in network.tensors.values() if tensor.dtype == "F32")
    assert resident_bytes(one.decoder) == stored + scratch - norms // 2  # norms are held as bf16
    assert one.notes == []


def test_other_types_become_bf16_and_the_user_is_told(tmp_path: Path) -> None:
    types = MIX | {"attn_v": "Q5_0", "ffn_down": "Q4_1"}
    one = teacher(write_gguf(tmp_path / "t.gguf", types))
    assert one.notes == [
        "4 matrices are Q4_K + Q5_0 and are converted to bf16",
        "4 matrices are Q4_1 and are converted to bf16",
    ]


def test_a_teacher_without_such_blocks_cannot_stay_blocks(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "t.gguf", dict.fromkeys([*MIX, "token_embd"], "F16"))
    with pytest.raises(RefusedError, match="no Q4_K, Q6_K, Q8_0 matrix") as error:
        teacher(path)
    assert "bf16" in (error.value.hint or "")
    assert error.value.path == str(path)


@pytest.mark.parametrize("residency", ["bf16", "q4k"])
@pytest.mark.parametrize(
    ("fill", "kind", "words"),
    [(0x00, RefusedError, "zero"), (0xFF, CorruptError, "NaN or infinite")],
    ids=["zeros", "NaN"],
)
def test_damaged_blocks_are_refused(
    residency: str, fill: int, kind: type[Exception], words: str, mixed: Path, tmp_path: Path
) -> None:
    with aprfmt.open(mixed) as model:
        tensor = model.tensors["blk.2.ffn_up.weight"]
        offset, size = tensor.offset, tensor.n_bytes
    data = bytearray(mixed.read_bytes())
    length = size if fill == 0 else 144
    data[offset : offset + length] = bytes([fill]) * length
    path = tmp_path / "damaged.gguf"
    path.write_bytes(data)
    with pytest.raises(kind, match=words) as error:
        teacher(path, residency)
    assert getattr(error.value, "tensor", None) == "model.layers.2.mlp.up_proj.weight"


def _held(one: Teacher) -> str:
    """Hash of all bytes that a teacher is made of."""
    parts = [p for p in one.decoder.parameters() if p.device.type != "meta"]
    if isinstance(one.decoder, BlocksDecoder):
        scratch = {t.data_ptr() for todo in one.decoder._targets.values() for _, t in todo}
        parts = [p for p in parts if p.data_ptr() not in scratch]
        parts += [b.stored_B for parts in one.decoder.stored.values() for b in parts]  # type: ignore[misc]
    for block in one.decoder.blocks:
        parts += [t for v in vars(block).values() if isinstance(v, Fp8Weight) for t in v]  # type: ignore[misc]
    return hashlib.sha256(b"".join(p.detach().view(torch.uint8).numpy().tobytes() for p in parts)).hexdigest()


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_a_teacher_is_never_trained(mixed: Path, residency: str) -> None:
    one = teacher(mixed, residency)
    before = _held(one)
    hidden = one.hidden(tokens(1))
    one.hidden(tokens(2))
    assert hidden.shape == (2, 24, D)
    assert hidden.dtype == torch.bfloat16
    assert not hidden.requires_grad
    assert not one.head_weight.requires_grad
    assert not one.decoder.training
    assert not any(parameter.requires_grad for parameter in one.decoder.parameters())
    assert _held(one) == before
    # What it gives can be used where a student's gradient is formed.
    student = torch.randn(D, 8, requires_grad=True)
    (hidden.float().clone() @ student).sum().backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None


@pytest.mark.parametrize("residency", RESIDENCIES)
def test_compiled_layers_give_the_same(mixed: Path, residency: str) -> None:
    one = teacher(mixed, residency)
    want = [one.hidden(tokens(n)) for n in range(3)]
    one.decoder.compile_blocks(backend="eager")
    try:
        for n in range(3):
            assert torch.equal(one.hidden(tokens(n)), want[n])
    finally:
        torch._dynamo.reset()


def test_a_teacher_in_float32_on_the_cpu(mixed: Path) -> None:
    one = teacher(mixed, "bf16", dtype=torch.float32)
    assert one.hidden(tokens(1)).dtype == torch.float32
    near = functional.cosine_similarity(
        one.hidden(tokens(1)).flatten(0, 1), teacher(mixed).hidden(tokens(1)).float().flatten(0, 1)
    )
    assert float(near.mean()) > 0.999


@pytest.mark.parametrize("case_id", ["llama", "qwen2", "qwen3", "gemma2"])
def test_bf16_is_as_exact_as_in_transformers(
    case_id: str, tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path
) -> None:
    pytest.importorskip("transformers")
    tiny = Maker(tmp_path_factory.mktemp("models"))(case_id)
    exact, theirs = tiny.logits(), tiny.reference.to(torch.bfloat16)(tiny.ids_NT, use_cache=False).logits
    with open_network(tiny.folder) as network:
        rows = network.shape.vocab_rows
        one = Teacher(network, SharedVocabulary(rows, rows, rows), "bf16", "cpu")
    ours = one.decoder.logits(one.hidden(tiny.ids_NT))
    far = [float((logits.detach().double() - exact).square().mean().sqrt()) for logits in (ours, theirs)]
    assert far[0] < 1.25 * far[1]
    assert far[0] < 0.05 * float(exact.std())


def test_logits_of_the_blocks_are_those_of_llama_cpp(tmp_path: Path, llama_cpp: LlamaPeer) -> None:
    path = tmp_path / "t.gguf"
    aprfmt.export_model(made.write_folder(tmp_path / "t"), path, dtype="Q4_K_M")
    one = teacher(path)
    ids = tokens(4, 1, 48)
    ours = functional.linear(one.hidden(ids), one.head_weight)[0].float()
    theirs = torch.from_numpy(np.array(llama_cpp.logits(path, ids[0].tolist())))
    near = functional.cosine_similarity(ours[:, :VOCAB], theirs[:, :VOCAB])
    assert float(near.mean()) > 0.999  # llama.cpp multiplies 8-bit activations


def test_e4m3_is_measured_against_bf16(mixed: Path) -> None:
    one, plain = teacher(mixed, "fp8"), teacher(mixed, "bf16")
    gate = one.gate
    assert gate is not None
    assert gate.passed
    assert gate.share == pytest.approx((LAYERS - 2) / LAYERS)
    assert gate.tokens == SAMPLE.numel()
    head_VD = plain.decoder.head_weight[:300].double()
    p, q = ((t.hidden(SAMPLE).double() @ head_VD.t()).log_softmax(-1).flatten(0, 1) for t in (plain, one))
    assert gate.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert gate.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert gate.kl > 0
    assert one.notes[0].startswith(f"e4m3 in {gate.share:.0%} of the layers' matmuls, bf16 in the others: KL to bf16")


def test_e4m3_is_of_the_inner_layers(mixed: Path) -> None:
    decoder = teacher(mixed, "fp8").decoder
    kinds = [type(getattr(block, name)).__name__ for block in decoder.blocks for part in module.PARTS for name in part]
    assert kinds == ["Parameter"] * 4 + ["Fp8Weight"] * 4 * (LAYERS - 2) + ["Parameter"] * 4


def test_as_many_parts_become_e4m3_as_pass(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = teacher(mixed, "fp8").gate
    assert whole is not None
    shares = []
    for factor in (0.999, 0.6, 0.3):
        monkeypatch.setattr(module, "MOST_KL", factor * whole.kl)
        one, again = teacher(mixed, "fp8"), teacher(mixed, "fp8")
        gate = one.gate
        assert gate is not None
        assert gate == again.gate
        assert 0 < gate.kl <= factor * whole.kl
        shares.append(gate.share)
        places = [getattr(block, name) for block in one.decoder.blocks for part in module.PARTS for name in part]
        values = [w.data_OI.numel() if isinstance(w, Fp8Weight) else 0 for w in places]
        in_all = sum(p.numel() for p in teacher(mixed).decoder.blocks.parameters() if p.dim() > 1)
        assert gate.share == pytest.approx(sum(values) / in_all)
        for block in one.decoder.blocks:
            for a, b in module.PARTS:
                assert type(getattr(block, a)) is type(getattr(block, b))
        p, q = ((t.hidden(SAMPLE).double() @ t.decoder.head_weight[:300].double().t()).log_softmax(-1).flatten(0, 1)
                for t in (teacher(mixed), one))  # fmt: skip
        assert gate.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert whole.share > shares[0] >= shares[1] >= shares[2] > 0


@pytest.mark.parametrize(("name", "value"), [("MOST_KL", 0.0), ("LEAST_AGREEMENT", 1.1)])
def test_e4m3_that_changes_too_much_is_refused(
    mixed: Path, name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, value)
    with pytest.raises(RefusedError, match="differs too much: KL 0") as error:
        teacher(mixed, "fp8")
    assert "bf16 or q4k" in (error.value.hint or "")


def test_nan_passes_no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_AGREEMENT", 0.98)
    assert module.Fp8Gate(0.001, 0.99, 1, 1.0).passed
    for kl, agreement in ((float("nan"), 1.0), (0.0, float("nan")), (0.02, 1.0), (0.0, 0.97)):
        assert not module.Fp8Gate(kl, agreement, 1, 1.0).passed


def test_two_layers_have_nothing_that_could_be_e4m3(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="between the first and the last"):
        teacher(write_gguf(tmp_path / "t.gguf", layers=2), "fp8")
