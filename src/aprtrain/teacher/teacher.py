"""The teacher: a frozen network that returns hidden states, and the form of its weights.

    bf16    matrices as bf16
    q4k     Q4_K, Q6_K and Q8_0 matrices stay in blocks and are dequantized on use
    fp8     products of the inner layers in e4m3, as many as pass the comparison with bf16

Matrices are never expanded to float32 unless requested. All variants share Decoder's forward pass.

Shape suffixes: N rows of a batch, T positions, S = N T, D = d_model, V rows of the head.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from aprfmt.canonical.tensor import CanonicalTensor
from aprfmt.codecs.dtypes import DTYPES
from aprfmt.errors import MissingDependencyError, RefusedError
from aprfmt.text import format_bytes
from aprfmt.tokenizer.alignment import SharedVocabulary
from aprtrain.features import TABLE, current, importable
from aprtrain.kernels.blocks import BLOCK_TYPES, Blocks, decode, is_kept, pick_rows, some_rows, upload
from aprtrain.kernels.fp8 import Fp8Weight, fits, quantize_weight
from aprtrain.network.attention import Documents
from aprtrain.network.decoder import BlockOutput, Decoder, soft_cap
from aprtrain.network.layout import FLOAT32
from aprtrain.network.names import head_name, hf_parts
from aprtrain.network.shape import Shape
from aprtrain.network.weights import CHECKED, NetworkSource, check_values, fill, load_decoder

RESIDENCIES = ("bf16", "q4k", "fp8")

# --- weights that stay blocks ---


def _decode_rows(blocks: Blocks) -> Iterator[Tensor]:
    """The matrix in pieces of whole rows, bf16."""
    rows, cols = blocks.shape
    step = max(1, CHECKED // cols)
    for first in range(0, rows, step):
        yield decode(some_rows(blocks, first, min(step, rows - first)))


class BlocksDecoder(Decoder):
    """A frozen Decoder in bf16 that keeps Q4_K, Q6_K and Q8_0 matrices as blocks.

    Matrices of one shape share one buffer for all layers: parameters are views of it, and before a layer runs
    its blocks are dequantized into them, on the same stream. So a layer sees exactly the values of a bf16 network. A
    fused matrix stays in blocks only if all its parts can.

    Attributes:
        stored: blocks by parameter, one per part.
        notes: which matrices are permanently bf16, and why.
    """

    def __init__(self, network: NetworkSource, device: torch.device) -> None:
        """Loads it. Raises RefusedError where no matrix can stay, else as `fill`."""
        super().__init__(network.shape, torch.bfloat16, "meta")
        self.stored: dict[str, tuple[Blocks, ...]] = {}
        self.notes: list[str] = []
        self._targets: dict[nn.Module, list[tuple[Blocks, Tensor]]] = {block: [] for block in self.blocks}
        others: Counter[str] = Counter()
        for parameter, tensors in network.by_parameter():
            if _stays(parameter, tensors):
                self.stored[parameter] = tuple(upload(tensor, device) for tensor in tensors)
                for tensor, blocks in zip(tensors, self.stored[parameter], strict=True):
                    check_values(network, tensor.name, _decode_rows(blocks))
                continue
            if len(tensors[0].shape) > 1:
                others[" + ".join(dict.fromkeys(tensor.dtype for tensor in tensors))] += 1
            whole = torch.empty_like(self.get_parameter(parameter), device=device, requires_grad=False)
            for name, target in hf_parts(network.shape, parameter, whole):
                fill(network, name, target)
            self._put(parameter, whole)
        if not self.stored:
            raise RefusedError(
                f"the teacher has no {', '.join(BLOCK_TYPES)} matrix to keep as blocks",
                path=network.path,
                hint="leave out --teacher-residency (bf16 here), or quantize the teacher first with apr quantize",
            )
        self.notes += [f"{n} matrices are {dtype} and are converted to bf16" for dtype, n in others.items()]
        self._share_scratch(device)

    def _put(self, parameter: str, value: Tensor) -> None:
        owner, _, name = parameter.rpartition(".")
        self.get_submodule(owner).register_parameter(name, nn.Parameter(value, requires_grad=False))

    def _share_scratch(self, device: torch.device) -> None:
        scratch: dict[tuple[str, torch.Size], Tensor] = {}
        for parameter, parts in self.stored.items():
            if not parameter.startswith("blocks."):
                continue
            owner, _, name = parameter.rpartition(".")
            like = self.get_parameter(parameter)
            if (key := (name, like.shape)) not in scratch:
                scratch[key] = torch.empty_like(like, device=device)
            target = scratch[key].detach()
            self._put(parameter, target)
            first = 0
            for part in parts:
                self._targets[self.get_submodule(owner)].append((part, target.narrow(0, first, part.shape[0])))
                first += part.shape[0]

    @property
    def head_weight(self) -> Tensor:
        """The head [V, D], dequantized on every use."""
        return self.head_rows(self.shape.vocab_rows)

    def head_rows(self, n: int) -> Tensor:
        """The first `n` rows of the head [n, D], dequantized on every use."""
        parts = self.stored.get(head_name(self.shape))
        if parts is None:
            return super().head_rows(n)
        return decode(some_rows(parts[0], 0, n))

    def look_up(self, tokens_NT: Tensor, name: str = "embed") -> Tensor:
        """Rows of an embedding [N, T, its width], dequantized one by one if it is in blocks."""
        parts = self.stored.get(name)
        if parts is None:
            return super().look_up(tokens_NT, name)
        return pick_rows(parts[0], tokens_NT.reshape(-1)).view(*tokens_NT.shape, -1)

    def whole(self, parameter: str) -> Tensor:
        """The values of a parameter, decoded where it stays blocks."""
        parts = self.stored.get(parameter)
        if parts is None:
            return super().whole(parameter)
        return torch.cat([decode(part) for part in parts])

    def run_block(self, block: nn.Module, *inputs: object) -> BlockOutput:
        """The block's output, its blocks decoded first."""
        if not torch.is_grad_enabled():
            return self._decoded(block, *inputs)
        # The next layer takes the scratch: the backward pass decodes again, and runs the layer again.
        out: BlockOutput = checkpoint(self._decoded, block, *inputs, use_reentrant=False)
        return out

    def _decoded(self, block: nn.Module, *inputs: object) -> BlockOutput:
        with torch.no_grad():
            for blocks, target in self._targets[block]:
                decode(blocks, target)
        out: BlockOutput = block(*inputs)
        return out


def _stays(parameter: str, tensors: Sequence[CanonicalTensor]) -> bool:
    """Whether a parameter stays in blocks: of those outside of layers, the embeddings and the head."""
    in_use = parameter.startswith("blocks.") or parameter in ("embed", "ple_embed", "head")
    return in_use and all(map(is_kept, tensors))


# --- products in e4m3 ---

MOST_KL = 0.01
"""Maximum mean difference of the distributions in nats."""

LEAST_AGREEMENT = 0.98
"""Minimum fraction of positions with an unchanged top-1 token."""

Part = tuple[int, tuple[str, ...]]
"""A layer and some of its matrices."""

PARTS: tuple[tuple[str, ...], ...] = (("qkv", "out"), ("gate_up", "down"))
"""Matrices of a layer that are converted to e4m3 together: a compiled layer for each of four cases suffices."""

_PROBED = 512
"""Positions on which a part is measured alone."""

COMPARED = 256
"""Positions per chunk of logits."""


@dataclass(frozen=True, slots=True)
class Fp8Gate:
    """How a network in e4m3 compares with itself in bf16.

    Attributes:
        kl: KL(bf16 || e4m3) in nats, mean over positions.
        agreement: fraction of positions with the same top-1 token.
        tokens: number of compared positions.
        share: fraction of the multiply-adds of all layers in e4m3.
    """

    kl: float
    agreement: float
    tokens: int
    share: float

    @property
    def passed(self) -> bool:
        """Whether it may be used; false for NaN."""
        return self.kl <= MOST_KL and self.agreement >= LEAST_AGREEMENT


@torch.no_grad()
def convert_to_fp8(decoder: Decoder, sample_NT: Tensor, n_real: int) -> Fp8Gate:
    """Converts the inner layers of a loaded network to e4m3, in place; returns the comparison.

    If converting all of them changes too much, the parts with the least change per multiply-add are converted, as many
    as pass.

    Args:
        decoder: in bf16.
        sample_NT: held-out tokens on its device.
        n_real: number of shared ids.

    Raises:
        RefusedError: no part changes little enough, or no matrix has a suitable size.
    """
    before_NTD = decoder(sample_NT)
    few = max(1, _PROBED // sample_NT.shape[1])
    bf16 = {
        (n, name): weight
        for n, block in enumerate(decoder.blocks)
        for part in PARTS
        for name in part
        if (weight := getattr(block, name)) is not None
        and becomes_fp8(decoder.shape, f"blocks.{n}.{name}", *weight.shape)
    }
    if not bf16:
        raise RefusedError(
            "no weight fits e4m3: it is used between the first and the last layer only, for dims that "
            "are multiples of 16",
            hint="leave out --teacher-residency, or use bf16",
        )
    e4m3 = {place: quantize_weight(weight) for place, weight in bf16.items()}
    parts = list(dict.fromkeys((n, part) for n, name in bf16 for part in PARTS if name in part))
    size = {part: sum(bf16[part[0], name].numel() for name in part[1] if (part[0], name) in bf16) for part in parts}
    total = sum(p.numel() for block in decoder.blocks for p in block.parameters() if p.dim() > 1)

    def gate_of(chosen: Sequence[Part], rows: int) -> Fp8Gate:
        names = {(n, name) for n, part in chosen for name in part}
        for place, weight in bf16.items():
            _put(decoder, place, e4m3[place] if place in names else weight)
        after_NTD = decoder(sample_NT[:rows])
        share = sum(map(size.__getitem__, chosen)) / total
        return compare(decoder, before_NTD[:rows].flatten(0, 1), after_NTD.flatten(0, 1), n_real, share)

    rows = len(sample_NT)
    if (gate := gate_of(parts, rows)).passed:
        return gate
    parts.sort(key={part: gate_of([part], few).kl / size[part] for part in parts}.__getitem__)
    passing = bisect_left(range(1, len(parts)), True, key=lambda n: not gate_of(parts[:n], rows).passed)
    if not passing:
        raise RefusedError(
            f"the e4m3 teacher differs too much: KL {gate.kl:.4f} nats (limit {MOST_KL}), same top-1 token at "
            f"{gate.agreement:.1%} of {gate.tokens} positions (minimum {LEAST_AGREEMENT:.0%}); no single part of a "
            "layer passes",
            hint="use --teacher-residency bf16 or q4k",
        )
    return gate_of(parts[:passing], rows)


def compare(decoder: Decoder, before_SD: Tensor, after_SD: Tensor, n_real: int, share: float) -> Fp8Gate:
    """Compares two sets of hidden states under the decoder's head, a chunk of positions at a time."""
    # bf16 logits would tie, change top-1 tokens, and add errors of their own.
    head_VD = decoder.head_weight[:n_real].to(torch.float16 if before_SD.is_cuda else torch.float32)
    cap = decoder.shape.logit_softcap
    kl = torch.zeros((), dtype=torch.float64, device=before_SD.device)
    same = torch.zeros_like(kl)
    for x, y in zip(torch.split(before_SD, COMPARED), torch.split(after_SD, COMPARED), strict=True):
        p, q = (soft_cap((h.to(head_VD.dtype) @ head_VD.t()).float(), cap).log_softmax(-1) for h in (x, y))
        kl += (p.exp() * (p - q)).sum(dtype=torch.float64)
        same += (p.argmax(-1) == q.argmax(-1)).sum()
    tokens = len(before_SD)
    return Fp8Gate(float(kl) / tokens, float(same) / tokens, tokens, share)


def becomes_fp8(shape: Shape, parameter: str, rows: int, cols: int) -> bool:
    """Whether a parameter of a Decoder becomes e4m3: suitable matrices of all layers but the first and the last."""
    _, _, place = parameter.partition("blocks.")
    layer, _, name = place.partition(".")
    return any(name in part for part in PARTS) and 0 < int(layer) < shape.n_layers - 1 and fits(rows, cols)


def _put(decoder: Decoder, place: tuple[int, str], weight: Fp8Weight | Tensor) -> None:
    """Replaces the parameter by an Fp8Weight, as a plain attribute."""
    layer, name = place
    delattr(decoder.blocks[layer], name)
    setattr(decoder.blocks[layer], name, weight)


# --- the teacher ---


class Teacher:
    """A frozen network.

    Attributes:
        decoder: its layers; without gradients.
        shape: of the network.
        vocabulary: which rows of its head are used.
        residency: one of RESIDENCIES.
        gate: how an fp8 teacher compares with bf16, else None.
        notes: for the user.
    """

    def __init__(
        self,
        network: NetworkSource,
        vocabulary: SharedVocabulary,
        residency: str,
        device: torch.device | str,
        *,
        dtype: torch.dtype = torch.bfloat16,
        sample_NT: Tensor | None = None,
        compiled: bool = False,
    ) -> None:
        """Loads it.

        Args:
            network: opened; may be closed afterwards.
            vocabulary: what it shares with the student.
            residency: one of RESIDENCIES.
            device: where it computes.
            dtype: of matrices and hidden states; only the residency bf16 has others, for the CPU.
            sample_NT: held-out tokens by which an fp8 teacher is compared with bf16; the residency fp8 needs them.
            compiled: whether its layers are compiled.

        Raises:
            RefusedError: nothing that q4k could keep, fp8 that differs too much from bf16, a matrix of zeros.
            CorruptError: NaN or infinite weights; ChecksumError: a file that is not what its checksum says.
        """
        device = torch.device(device)
        self.shape: Shape = network.shape
        self.vocabulary = vocabulary
        self.residency = residency
        self.gate: Fp8Gate | None = None
        self.notes: list[str] = []
        self.decoder: Decoder
        if residency == "q4k":
            self.decoder = BlocksDecoder(network, device)
            self.notes += self.decoder.notes
        else:
            self.decoder = load_decoder(network, dtype, device)
        network.check_intact()
        self.decoder.requires_grad_(False).eval()
        if residency == "fp8" and sample_NT is not None:
            self.gate = convert_to_fp8(self.decoder, sample_NT.to(device), vocabulary.n_real)
            self.notes.append(
                f"e4m3 in {self.gate.share:.0%} of the layers' matmuls, bf16 in the others: KL to bf16 "
                f"{self.gate.kl:.2g} nats, same top-1 token at {self.gate.agreement:.2%} of {self.gate.tokens} "
                "held-out positions"
            )
        if compiled:
            self.decoder.compile_blocks()

    def hidden(self, tokens_NT: Tensor, documents: Documents | None = None) -> Tensor:
        """Hidden states [N, T, D] after the final norm, without saving anything for gradients."""
        with torch.inference_mode():
            hidden_NTD = self.decoder(tokens_NT, documents)
        assert isinstance(hidden_NTD, Tensor)
        return hidden_NTD

    @property
    def head_weight(self) -> Tensor:
        """The head [V, D]: the rows of shared ids, rounded up to a multiple of 64.

        A q4k teacher dequantizes it on every use: take it once per micro-batch and release it.
        """
        return self.decoder.head_rows(self.vocabulary.teacher_width)

    @property
    def n_bytes(self) -> int:
        """Total bytes of its parameters, each in its own dtype."""
        held = {id(parameter): parameter for parameter in self.decoder.parameters() if not parameter.is_meta}
        parts = [part for block in self.decoder.blocks for value in vars(block).values() for part in _parts(value)]
        return sum(tensor.nbytes for tensor in (*held.values(), *parts))

    @property
    def dropped_weight(self) -> Tensor | None:
        """The rows [R, D] of the head for tokens that only the teacher has, or None."""
        rows = self.vocabulary.dropped_rows
        return self.decoder.head_rows(rows.stop)[rows] if rows.start < rows.stop else None


def _parts(value: object) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, Fp8Weight) else ()


def residency_of(network: NetworkSource) -> str:
    """The residency that "auto" selects: "q4k" if most of the file's weights are blocks that can stay."""
    kept = sum(prod(t.shape) for _, tensors in network.by_parameter() if all(map(is_kept, tensors)) for t in tensors)
    return "q4k" if 2 * kept > network.shape.n_params else "bf16"


def note_decoded(network: NetworkSource, *, asked: bool = False) -> None:
    """Notes the quantized matrices of a teacher that become bf16: no kernel supports their types, or it was `asked`."""
    tensors = [tensor for _, tensors in network.by_parameter() for tensor in tensors]
    packed = [t for t in tensors if DTYPES[t.dtype].block > 1 and (asked or not is_kept(t))]
    if packed:
        types = ", ".join(dict.fromkeys(tensor.dtype for tensor in packed))
        stored, decoded = sum(t.n_bytes for t in packed), sum(2 * prod(t.shape) for t in packed)
        mend = "leave out --teacher-residency" if asked and residency_of(network) == "q4k" else ""
        text = f"{types} of the teacher are converted to bf16: {format_bytes(decoded)} for {format_bytes(stored)}"
        current().miss("blocks", text, mend)


def check_residency(residency: str, device: torch.device) -> None:
    """Checks what the teacher's residency requires of `device`.

    Raises MissingDependencyError without Triton, whose kernels dequantize blocks and quantize to e4m3 on a GPU;
    RefusedError for e4m3 on a GPU whose tensor cores lack it.
    """
    if device.type != "cuda" or residency == "bf16":
        return
    if not (found := importable("triton")):
        raise MissingDependencyError(
            f"a teacher in {residency} needs Triton on a GPU: {found.reason}", hint=TABLE["triton"].mend
        )
    if residency == "fp8" and (capability := torch.cuda.get_device_capability(device)) < (8, 9):
        raise RefusedError(
            f"e4m3 needs compute capability 8.9, this GPU has {capability[0]}.{capability[1]}",
            hint="use --teacher-residency bf16 or q4k",
        )


def teacher_dtype(residency: str, device: torch.device) -> torch.dtype:
    """The teacher's compute dtype: bfloat16, but float32 for bf16 weights on the CPU."""
    return torch.float32 if device.type == "cpu" and residency == "bf16" else torch.bfloat16


def compared_bytes(network: NetworkSource) -> int:
    """Bytes of the bf16 matrices that are held in addition to those in e4m3 while an fp8 teacher is compared."""
    sizes = ((name, sum(t.shape[0] for t in ts), sum(prod(t.shape) for t in ts)) for name, ts in network.by_parameter())
    return sum(2 * n for name, rows, n in sizes if becomes_fp8(network.shape, name, rows, n // rows))


def estimate_bytes(network: NetworkSource, residency: str) -> int:
    """Bytes that a Teacher occupies between batches, from the file's index alone; fp8 as if all parts pass."""
    total, scratch = 0, dict[tuple[str, int, int], int]()
    for parameter, tensors in network.by_parameter():
        rows, values = sum(t.shape[0] for t in tensors), sum(prod(t.shape) for t in tensors)
        if residency == "q4k" and _stays(parameter, tensors):
            total += sum(t.n_bytes for t in tensors)
            if parameter.startswith("blocks."):
                scratch[parameter.rpartition(".")[2], rows, values] = 2 * values
        elif residency == "fp8" and becomes_fp8(network.shape, parameter, rows, values // rows):
            total += values + 4 * rows
        else:
            total += (4 if parameter.rpartition(".")[2] in FLOAT32 else 2) * values
    return total + sum(scratch.values())
