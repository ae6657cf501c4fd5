"""The decoder computes what transformers computes, document by document, and what it computes can be trained."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny_models
import torch
from arch_models import all_cases, find_case, make_config
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from train_models import Maker, error, load, our_logits, same_winners

from aprfmt.arch.hparams import from_hf_config
from aprfmt.arch.table import ARCHITECTURES
from aprfmt.errors import RefusedError, UnsupportedError, UsageError
from aprtrain.features import recording
from aprtrain.models import initialize_weights
from aprtrain.network import attention
from aprtrain.network import decoder as decoder_module
from aprtrain.network.attention import AttentionPlan, Documents, attend, choose, places
from aprtrain.network.decoder import Decoder
from aprtrain.network.experts import choose_experts
from aprtrain.network.names import hf_names, hf_parts
from aprtrain.network.shape import FAMILIES, Shape, shape_of
from aprtrain.network.weights import open_network

CASES = [
    case.id
    for case in all_cases()
    if case.row in FAMILIES and case.computable and case.kind == "causal"
    and case.id not in ("olmoe/clip_qkv", "ernie4_5_moe/bias", "gemma/paligemma", "gemma4_text/both_ways")
    and case.dtype == "float32"  # transformers rounds its frequencies to another
]  # fmt: skip
TEACHERS = ["deepseek_v3", "deepseek_v3/whole_q", "glm4_moe/groups", "minimax_m2", "exaone_moe", "lfm2_moe"]
ROUTED = [
    "mixtral", "qwen3_moe", "qwen3_moe/every_second", "gpt_oss", "deepseek_v2", "deepseek_v2/groups", "olmoe",
    "granitemoe", "hunyuan_v1_moe", "mellum", "gemma4_text/k_eq_v", "gemma4_text/per_layer",
    "qwen3_5_moe_text", "qwen3_next",
]  # fmt: skip
"""Students with experts."""
STUDENTS = [
    "llama", "qwen2/untied", "gemma3_text", "phi3/partial", "granite", "olmo2", "olmo3", "glm", "glm4",
    "arcee/biases", "ernie4_5", "exaone4/hybrid_small", "hunyuan_v1_dense", "cohere2", "starcoder2",
    "ministral3/temperature", "phi3/longrope_long", "llama/longrope", "cohere/qk_norm_few", "nemotron/bias", "jais2",
    "lfm2/mha", "lfm2/conv-bias", "gemma4_text/sharing", "gemma4_text/sharing_odd",
    "qwen3_5_text", "qwen3_5_text/heads",
]  # fmt: skip
PACKED = [
    "mistral/window", "smollm3/window", "qwen3", "gemma2", "gemma2/uncapped", "phi3/window", "starcoder2/window",
    *STUDENTS, *TEACHERS, *ROUTED,
]  # fmt: skip


def shape_of_case(case_id: str, **config: Any) -> Shape:
    """The Shape of a case without a model of it."""
    pytest.importorskip("transformers")
    case = find_case(case_id)
    value = json.loads(make_config(case, 64).to_json_string()) | {"architectures": [case.model_class]} | config
    h = from_hf_config(value)
    return shape_of(h, ARCHITECTURES.get(h.architecture or ""))


def most(case_id: str) -> float:
    """The largest error of logits; transformers' float32 parts are up to 6e-5 from float64 in some cases."""
    return 5e-5 if case_id.startswith(("qwen3_5", "qwen3_next")) or case_id == "gemma4_text/sharing_odd" else 1e-5


def gradient_error(a: Tensor, b: Tensor) -> float:
    """As `error`; a tenth of it or of the difference for a single number, the scale of a layer: a sum that cancels."""
    return error(a, b) if b.numel() > 1 else min(error(a, b), float(abs(a - b))) / 10


def random_decoder(shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Decoder:
    decoder = Decoder(shape, dtype, device)
    initialize_weights(decoder, 1, spread=0.2)
    return decoder


@pytest.mark.parametrize("case_id", ["llama", "gemma2", "lfm2", "qwen3_5_text"])
def test_initial_weights_are_the_same_in_every_dtype(case_id: str) -> None:
    shape = shape_of_case(case_id)
    single, double, half = (
        random_decoder(shape, d).state_dict() for d in (torch.float32, torch.float64, torch.bfloat16)
    )
    for name, weight in single.items():
        assert torch.equal(double[name].float(), weight)
        assert torch.equal(half[name], weight.to(half[name].dtype))


@pytest.mark.turns(rows=True)
@pytest.mark.parametrize("case_id", CASES)
def test_logits_equal_those_of_transformers(case_id: str, tiny: Maker) -> None:
    """In float64 where transformers computes in it: in float32 both are up to 5e-5 from it, by the processor."""
    model = tiny(case_id)
    decoder, reference = load(model.folder), copy.deepcopy(model.reference)
    if decoder.shape.experts is None and decoder.shape.delta is None:
        decoder, reference = decoder.double(), reference.double()
    with torch.no_grad():
        expected = reference(model.ids_NT, use_cache=False).logits
    logits = our_logits(decoder, model.ids_NT)
    assert error(logits, expected) < most(case_id)
    assert same_winners(logits, expected)


@pytest.mark.parametrize("case_id", PACKED)
def test_a_packed_document_is_computed_as_if_it_were_alone(case_id: str) -> None:
    decoder = random_decoder(shape_of_case(case_id))
    tokens_NT = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(2))
    lengths = [13, 1, 26, 40]
    documents = Documents.of(lengths, max_len=40, capacity=7)
    with torch.no_grad():
        packed_SD = decoder(tokens_NT, documents).flatten(0, 1)
        alone = [decoder(part[None]) for part in tokens_NT.flatten().split(lengths)]  # type: ignore[no-untyped-call]
        together = decoder(tokens_NT)
    expected_SD = torch.cat(alone, dim=1)[0]
    assert error(packed_SD, expected_SD) < 1e-5
    assert error(together.flatten(0, 1)[14:40], expected_SD[14:40]) > 1e-2  # what packing must prevent
    changed_NT = tokens_NT.clone()
    changed_NT[0, :13] = (changed_NT[0, :13] + 1) % 64
    with torch.no_grad():
        again_SD = decoder(changed_NT, documents).flatten(0, 1)
    assert error(again_SD[13:], packed_SD[13:]) < (1e-6 if decoder.shape.experts else 1e-12)  # other rows of a product
    assert not torch.equal(again_SD[:13], packed_SD[:13])


def test_no_token_sees_what_comes_after_it() -> None:
    decoder = random_decoder(shape_of_case("llama"))
    tokens_NT = torch.arange(20)[None]
    changed_NT = tokens_NT.clone()
    changed_NT[0, 12] = 50
    with torch.no_grad():
        a, b = decoder(tokens_NT), decoder(changed_NT)
    assert error(a[:, :12], b[:, :12]) < 1e-6
    assert error(a[:, 12:], b[:, 12:]) > 1e-3


def test_every_parameter_learns_and_the_loss_falls() -> None:
    decoder = random_decoder(shape_of_case("gemma3_text"))
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=3e-3)
    tokens_NT = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(3))
    losses = []
    for _ in range(12):
        logits = decoder.logits(decoder(tokens_NT))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_NT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for name, parameter in decoder.named_parameters():
            assert parameter.grad is not None, name
            assert float(parameter.grad.abs().sum()) > 0, name
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


def learning(reference: Any) -> Any:
    """A copy whose scales of layers, which transformers freezes, learn."""
    reference = copy.deepcopy(reference)
    for module in reference.modules():
        if "layer_scalar" in module._buffers:
            module.layer_scalar = torch.nn.Parameter(module._buffers.pop("layer_scalar"))
    return reference


@pytest.mark.parametrize("case_id", STUDENTS)
def test_gradients_equal_those_of_transformers(case_id: str, tiny: Maker) -> None:
    """In float64: in float32 both are up to 1e-4 from it, by the processor."""
    model = tiny(case_id)
    decoder, reference = load(model.folder).double(), learning(model.reference).double()
    labels = model.ids_NT[0, 1:]
    ours = functional.cross_entropy(decoder.logits(decoder(model.ids_NT))[0, :-1], labels)
    theirs = functional.cross_entropy(reference(model.ids_NT, use_cache=False).logits[0, :-1], labels)
    gradients = torch.autograd.grad(ours, [*decoder.parameters()])
    parameters = dict(reference.named_parameters())
    expected = dict(zip(parameters, torch.autograd.grad(theirs, [*parameters.values()]), strict=True))
    of_parameter = dict(zip(dict(decoder.named_parameters()), gradients, strict=True))
    found = {hf: part for name, grad in of_parameter.items() for hf, part in hf_parts(decoder.shape, name, grad)}
    assert set(found) == set(expected)
    for hf, grad in found.items():
        assert gradient_error(grad, expected[hf]) < 1e-4, hf
        assert bool(expected[hf].any()), hf


@pytest.mark.parametrize("case_id", ROUTED)
def test_gradients_of_experts_equal_those_of_transformers(case_id: str, tiny: Maker, tmp_path: Path) -> None:
    """By the names of a checkpoint, which transformers changes when it writes one."""
    model = tiny(case_id)
    decoder, reference = load(model.folder), learning(model.reference)
    labels = model.ids_NT[0, 1:]
    ours = functional.cross_entropy(decoder.logits(decoder(model.ids_NT))[0, :-1], labels)
    theirs = functional.cross_entropy(reference(model.ids_NT, use_cache=False).logits[0, :-1], labels)
    of_parameter = dict(
        zip(dict(decoder.named_parameters()), torch.autograd.grad(ours, [*decoder.parameters()]), strict=True)
    )
    parameters = [*reference.parameters()]
    for parameter, grad in zip(parameters, torch.autograd.grad(theirs, parameters), strict=True):
        parameter.data.copy_(grad)
    reference.save_pretrained(tmp_path / "gradients")
    expected = load_file(tmp_path / "gradients/model.safetensors")
    found = {hf: part for name, grad in of_parameter.items() for hf, part in hf_parts(decoder.shape, name, grad)}
    assert set(found) == set(expected)
    for hf, grad in found.items():
        assert gradient_error(grad, expected[hf]) < 10 * most(case_id), hf


def test_the_load_of_experts_is_balanced() -> None:
    """The gradient of the router is that of the loss written out: E sum f p, the mean over layers and tokens."""
    shape = shape_of_case("qwen3_moe")
    decoder, tokens_NT = random_decoder(shape), torch.arange(40).view(2, 20)
    routers = [p for name, p in decoder.named_parameters() if name.endswith(".router")]
    plain = torch.autograd.grad(decoder(tokens_NT).square().sum(), routers)
    decoder.balance_experts(0.3, tokens_NT.numel())
    balanced = torch.autograd.grad(decoder(tokens_NT).square().sum(), routers)
    decoder.balance_experts(0.0, 1)
    scores: list[Tensor] = []
    with mock.patch.object(
        decoder_module, "choose_experts", lambda y, router, *given: chosen_with(scores, y, router, *given)
    ):
        decoder(tokens_NT)
    e = shape.experts
    assert e is not None
    losses = []
    for scores_SE in scores:
        share_E = torch.zeros(e.n).index_add_(0, scores_SE.topk(e.used).indices.flatten(), torch.ones(40 * e.used)) / 40
        losses.append(e.n * (share_E * scores_SE.mean(0)).sum())
    expected = torch.autograd.grad(0.3 * torch.stack(losses).mean(), routers)
    for before, after, wanted in zip(plain, balanced, expected, strict=True):
        assert float(wanted.abs().max()) > 1e-6
        torch.testing.assert_close(after - before, wanted, rtol=1e-2, atol=float(before.abs().max()) * 1e-5)


def chosen_with(scores: list[Tensor], y_SD: Tensor, router_ED: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """As `choose_experts`, which keeps the scores."""
    scores.append((y_SD.float() @ router_ED.float().T).softmax(-1))
    return choose_experts(y_SD, router_ED, *given)


def test_recomputed_blocks_give_the_same_gradients() -> None:
    decoder = random_decoder(shape_of_case("qwen3"))
    tokens_NT = torch.arange(30).view(2, 15)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(decoder(tokens_NT).square().sum(), [*decoder.parameters()])

    plain = gradients()
    decoder.recompute = "block"
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))


@pytest.mark.turns
@pytest.mark.parametrize("case_id", ["llama/biases", "qwen3/untied", *STUDENTS, *TEACHERS, *ROUTED])
def test_tensors_come_back_as_they_were_loaded(case_id: str) -> None:
    shape = shape_of_case(case_id)
    decoder = Decoder(shape)
    assert all(bool(parameter.isnan().all()) for parameter in decoder.parameters())
    values = {name: torch.randn(size) for name, (_, _, size) in hf_names(shape).items()}
    for name, value in values.items():
        decoder.hf_tensors()[name].copy_(value)
    assert not any(bool(parameter.isnan().any()) for parameter in decoder.parameters())  # nothing was left out
    assert sum(value.numel() for value in values.values()) == sum(p.numel() for p in decoder.parameters())
    back = decoder.hf_tensors()
    assert list(back) == list(values)
    assert all(torch.equal(back[name], value) for name, value in values.items())
    assert all(tensor.is_contiguous() for tensor in back.values())


def test_the_head_is_the_embedding_only_where_it_is_tied() -> None:
    tied, untied = (Decoder(shape_of_case(case)) for case in ("llama/tied", "llama"))
    assert tied.head_weight is tied.embed
    assert untied.head_weight is untied.head
    assert untied.head.shape == untied.embed.shape


@pytest.mark.turns
@pytest.mark.parametrize("case_id", ["gemma2", "smollm3", *STUDENTS, *TEACHERS])
def test_blocks_compile_once_whatever_the_documents(case_id: str, fresh_dynamo: None) -> None:
    shape = shape_of_case(case_id)
    decoder = random_decoder(shape, torch.bfloat16 if shape.experts else torch.float32)
    tokens_NT = torch.arange(24).view(1, 24)
    packed = [Documents.of(lengths, max_len=24, capacity=4) for lengths in ([24], [10, 14], [1, 2, 3, 18])]
    with torch.no_grad():
        plain = [decoder(tokens_NT, documents) for documents in packed]
        counter = torch._dynamo.testing.CompileCounter()
        decoder.compile_blocks(counter)
        s = decoder.shape
        kinds = {
            (s.windows[n], s.layer_ropes[n] < 0, s.layer_kinds[n], decoder.get_submodule(f"blocks.{n}").gives_kv)
            for n in range(s.n_layers)
        }
        for documents, expected in zip(packed, plain, strict=True):
            assert torch.equal(decoder(tokens_NT, documents), expected)
            assert counter.frame_count <= len(kinds)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    import torch._dynamo.testing

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_the_cheapest_exact_way_is_chosen() -> None:
    tokens_NT, documents = torch.zeros(2, 16, dtype=torch.int64), Documents.of([16, 16], max_len=16)

    def way(packed: bool, **more: Any) -> str:
        number_NT = torch.zeros(2, 16) if packed else None
        options: dict[str, Any] = {"window": 0, "heads": (4, 2, 64), "dtype": torch.bfloat16, **more}
        return choose(tokens_NT, documents if packed else None, number_NT, **options).kind

    assert way(False) == "causal"
    assert way(False, window=16) == "causal"  # no position is out of reach
    assert way(False, window=15) == "mask"
    assert way(True) == "mask"
    assert way(False, sinks=True) == way(True, sinks=True, window=4) == "eager"
    assert way(False, softcap=30.0) == way(True, softcap=30.0, window=4) == "eager"


@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("softcap", "n_sinks"), [(3.0, 0), (0.0, 4), (3.0, 4)])
def test_scores_of_some_queries_at_a_time_give_the_same(
    softcap: float, n_sinks: int, packed: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORED", 5)
    drawn = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 23, n, 8, generator=drawn).double().requires_grad_() for n in (4, 2, 2)]
    sinks = torch.randn(n_sinks, generator=drawn).double().requires_grad_() if n_sinks else None
    documents = Documents.of([9, 1, 13, 23], max_len=23) if packed else None
    number_NT = places(torch.zeros(2, 23), documents)[2]
    seen = attention._mask(number_NT, window, range(23), range(23), torch.device("cpu"))
    plans = AttentionPlan("eager", seen), AttentionPlan("eager", window=window, number_NT=number_NT)
    leaves = inputs if sinks is None else [*inputs, sinks]
    found = []
    for plan in plans:
        q, k, v = inputs
        out = attend(q, k, v, plan, scale=0.4, softcap=softcap, sinks=sinks)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    for value, want in zip(*found, strict=True):
        assert torch.allclose(value, want, rtol=1e-10, atol=1e-12)


def test_softcapped_scores_are_never_all_there() -> None:
    """Neither in a pass nor kept for the backward one: memory grows with the length, not with its square."""
    t, sizes = 8 * attention.SCORED, list[int]()

    class Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
            return out

    kept = list[int]()

    def keep(value: Tensor) -> Tensor:
        kept.append(value.numel())
        return value

    q, k, v = (torch.randn(1, t, 1, 4, requires_grad=True) for _ in range(3))
    with Sizes(), torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):  # type: ignore[no-untyped-call]
        out = attend(q, k, v, AttentionPlan("eager"), scale=0.5, softcap=20.0)
        out.sum().backward()  # type: ignore[no-untyped-call]
    assert max(sizes) == attention.SCORED * t
    assert max(kept, default=0) <= 4 * t


def test_compiled_blocks_with_a_softcap_have_the_same_gradients(
    fresh_dynamo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "SCORED", 8)
    decoder = random_decoder(shape_of_case("gemma2"))
    tokens_NT, documents = torch.arange(24).view(1, 24), Documents.of([10, 14], max_len=24)

    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(decoder(tokens_NT, documents).square().sum(), [*decoder.parameters()])

    plain = gradients()
    decoder.compile_blocks("aot_eager")
    with recording() as record:
        assert all(error(a, b) < 1e-5 for a, b in zip(plain, gradients(), strict=True))
    assert [miss.text() for miss in record.missed] == []


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", r"ignore:\s*Online softmax is disabled")
@pytest.mark.parametrize("case_id", ["mistral/window", "gemma2", *STUDENTS, *TEACHERS])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_computes_the_same_in_float32_and_nearly_so_in_bfloat16(
    case_id: str, compiled: bool, fresh_dynamo: None
) -> None:
    shape = shape_of_case(case_id)
    tokens_NT = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(2))
    documents = Documents.of([13, 1, 26, 40], max_len=40, capacity=7)
    on_gpu = replace(documents, cu_seqlens=documents.cu_seqlens.to("cuda"))
    with torch.no_grad():
        expected = random_decoder(shape)(tokens_NT, documents)
        for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
            decoder = random_decoder(shape, dtype, "cuda")
            if compiled:
                decoder.compile_blocks()
            off = (decoder(tokens_NT.cuda(), on_gpu).cpu().float() - expected).abs().amax(-1) / expected.abs().max()
            # Rounded scores of experts that are nearly equal choose others; the states of a delta rule keep roundings.
            assert float(off.quantile(0.8 if shape.experts or shape.delta else 1.0)) < most
    if not shape.attn_softcap:
        plan = choose(
            tokens_NT.cuda(), on_gpu, None,
            window=8, heads=(4, 2, shape.head_dim), dtype=torch.bfloat16,
        )  # fmt: skip
        assert plan.kind == ("flash4" if find_spec("flash_attn") else "varlen")


def test_documents_of_impossible_lengths_are_refused() -> None:
    for lengths in ([], [3, 0], [5, 9]):
        with pytest.raises(UsageError, match="1 to 8 tokens"):
            Documents.of(lengths, max_len=8)
    assert Documents.of([3, 5], max_len=8, capacity=4).cu_seqlens.tolist() == [0, 3, 8, 8, 8]


@pytest.mark.parametrize(
    ("case_id", "config", "words"),
    [
        ("olmo", {}, "architecture 'olmo' is not supported for training"),
        ("qwen2_moe", {}, "architecture 'qwen2_moe' is not supported for training"),
        ("olmoe/clip_qkv", {}, "clip_qkv"),
        ("ernie4_5_moe/bias", {}, "bias of the output head"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "axial"}}, "rope scaling 'axial'"),
        ("llama", {"hidden_act": "tanh"}, "activation 'tanh'"),
        ("deepseek_v3", {"scoring_func": "sqrt"}, "unsupported router score function 'sqrt'"),
        ("mellum", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial RoPE"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(case_id: str, config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        shape_of_case(case_id, **config)


def test_a_file_that_cannot_be_computed_is_named(tmp_path: Path) -> None:
    tiny_models.build(replace(find_case("olmo"), tokenizer=tiny_models.BYTES), tmp_path / "m", None)
    with (
        pytest.raises(UnsupportedError, match="'olmo' is not supported for training") as caught,
        open_network(tmp_path / "m"),
    ):
        pass
    assert caught.value.path == str(tmp_path / "m")


def test_a_config_without_sizes_is_refused_by_name() -> None:
    with pytest.raises(RefusedError, match="lacks num_layers"):
        shape_of(from_hf_config({"model_type": "llama", "hidden_size": 64}), ARCHITECTURES["llama"])


@pytest.mark.parametrize("case_id", ["llama", "llama/tied", "llama/biases", "gemma2", *TEACHERS])
def test_shapes_count_their_elements(case_id: str, tiny: Maker) -> None:
    shape = shape_of_case(case_id)
    assert shape.n_params == sum(parameter.numel() for parameter in Decoder(shape).parameters())
    published = sum(v.numel() for name, v in tiny(case_id).reference.state_dict().items() if name != "lm_head.weight")
    here = tiny(case_id).reference.config.vocab_size * shape.d_model
    assert shape.n_params - (1 if shape.tied else 2) * 64 * shape.d_model == published - here


_BIG: dict[str, tuple[dict[str, Any], float, float]] = {
    "deepseek_v3": ({
        "hidden_size": 7168, "num_hidden_layers": 61, "intermediate_size": 18432, "num_attention_heads": 128,
        "num_key_value_heads": 128, "vocab_size": 129280,
    }, 671.0, 37),
    "qwen3_moe": ({
        "hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 6144, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
    }, 30.5, 3.3),
    "gpt_oss": ({
        "hidden_size": 2880, "num_hidden_layers": 36, "intermediate_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088,
    }, 116.8, 5.1),
}  # fmt: skip


@pytest.mark.parametrize("row", _BIG)
def test_published_models_have_their_published_sizes(row: str) -> None:
    """DeepSeek-V3, Qwen3-30B-A3B and gpt-oss-120b in billions, all and those of a token with its head."""
    config, whole, active = _BIG[row]
    shape = shape_of(from_hf_config({"model_type": row, **config}), ARCHITECTURES[row])
    assert shape.n_params / 1e9 == pytest.approx(whole, abs=0.1)
    of_token = shape.n_active_params + shape.vocab_rows * shape.d_model
    assert of_token / 1e9 == pytest.approx(active, rel=0.1)


def test_of_experts_those_that_a_token_takes_are_work() -> None:
    """Of four experts with three matrices of 64 x 48 a token takes two."""
    shape = shape_of_case("qwen3_moe")
    assert shape.n_layers * shape.n_layer_params - shape.n_active_params == 2 * 2 * 3 * 64 * 48
    dense = shape_of_case("qwen3")
    assert dense.n_active_params == dense.n_layers * dense.n_layer_params
