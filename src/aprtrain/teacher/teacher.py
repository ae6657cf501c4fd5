"""The teacher: a frozen network that gives hidden states, and where its weights live.

    bf16    matrices as bf16
    q4k     Q4_K, Q6_K and Q8_0 matrices stay the blocks of the file, see `blocks`
    fp8     products of the inner layers in e4m3, once that was compared with bf16, see `fp8`

No matrix is float32 on its way, unless float32 is asked for. There is one forward, that of Decoder.

Shape suffixes: N rows of a batch, T positions, D = d_model, V rows of the head.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from aprtrain.loss.vocab import Vocabulary
from aprtrain.network.attention import Documents
from aprtrain.network.decoder import Decoder, head_name, parts_of
from aprtrain.network.shape import Shape
from aprtrain.network.weights import Network, load_decoder, stays_blocks
from aprtrain.teacher.blocks import BlocksDecoder, load_head
from aprtrain.teacher.fp8 import Gate, becomes_fp8, convert_to_fp8

RESIDENCIES = ("bf16", "q4k", "fp8")


class Teacher:
    """A network that is never trained.

    Attributes:
        decoder: its layers; no parameter has a gradient.
        shape: of the network.
        vocabulary: which rows of its head are used.
        residency: one of RESIDENCIES.
        gate: how an fp8 teacher compares with bf16, else None.
        notes: what the user should know about it.
        has_backbone: whether more than its head is there.
    """

    def __init__(
        self,
        network: Network,
        vocabulary: Vocabulary,
        residency: str,
        device: torch.device | str,
        *,
        dtype: torch.dtype = torch.bfloat16,
        sample_NT: Tensor | None = None,
        compiled: bool = False,
        backbone: bool = True,
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
            backbone: whether its layers are loaded; its head always is.

        Raises:
            RefusedError: nothing that q4k could keep, fp8 that differs too much from bf16, a matrix of zeros.
            CorruptError: NaN or infinite weights.
        """
        device = torch.device(device)
        self.shape: Shape = network.shape
        self.vocabulary = vocabulary
        self.residency = residency
        self.gate: Gate | None = None
        self.notes: list[str] = []
        self.has_backbone = backbone
        self.decoder: Decoder
        if residency == "q4k":
            only = None if backbone else head_name(network.shape)
            self.decoder = BlocksDecoder(network, device, only)
            self.notes += self.decoder.notes
        else:
            load = load_decoder if backbone else load_head
            self.decoder = load(network, dtype, device)
        self.decoder.requires_grad_(False).eval()
        if residency == "fp8" and sample_NT is not None and backbone:
            self.gate = convert_to_fp8(self.decoder, sample_NT.to(device), vocabulary.n_real)
            kept = f", {' and '.join(self.gate.kept)} in bf16" if self.gate.kept else ""
            self.notes.append(
                f"e4m3{kept}: KL to bf16 {self.gate.kl:.2g} nats, the same first choice at "
                f"{self.gate.agreement:.2%} of {self.gate.tokens} held-out positions"
            )
        if compiled and backbone:
            self.decoder.compile_blocks()

    def hidden(self, tokens_NT: Tensor, documents: Documents | None = None) -> Tensor:
        """Hidden states [N, T, D] after the final norm, without anything that a gradient would need."""
        with torch.inference_mode():
            hidden_NTD = self.decoder(tokens_NT, documents)
        assert isinstance(hidden_NTD, Tensor)
        return hidden_NTD

    @property
    def head_weight(self) -> Tensor:
        """The head [V, D]: the rows of shared ids, up to a multiple of 64 of them.

        Of a q4k teacher it is decoded by every use: take it once a micro-batch and let go of it.
        """
        rows = self.vocabulary.teacher_width
        if isinstance(self.decoder, BlocksDecoder):
            return self.decoder.head_rows(rows)
        return self.decoder.head_weight[:rows].detach()

    @property
    def dropped_weight(self) -> Tensor | None:
        """The rows [R, D] of the head that stand for tokens of the teacher alone; None where there are none."""
        rows = self.vocabulary.dropped_rows
        if rows.start >= rows.stop:
            return None
        if isinstance(self.decoder, BlocksDecoder):
            return self.decoder.head_rows(rows.stop)[rows]
        return self.decoder.head_weight[rows].detach()


def teacher_dtype(residency: str, device: torch.device) -> torch.dtype:
    """What the teacher computes in: bfloat16, but float32 for bf16 weights on the CPU."""
    return torch.float32 if device.type == "cpu" and residency == "bf16" else torch.bfloat16


def estimate_bytes(network: Network, residency: str, *, backbone: bool = True) -> int:
    """Bytes that a Teacher holds between batches, from the file's index alone; fp8 as if it passes at once.

    An fp8 teacher takes what a bf16 one takes beside it while it is compared.
    """
    total, scratch = 0, dict[str, int]()
    for parameter, parts in parts_of(network.shape).items():
        if not backbone and parameter != head_name(network.shape):
            continue
        tensors = [network.tensors[name] for name, _, _ in parts]
        rows, values = sum(t.shape[0] for t in tensors), sum(prod(t.shape) for t in tensors)
        if residency == "q4k" and all(map(stays_blocks, tensors)):
            total += sum(t.n_bytes for t in tensors)
            if parameter.startswith("blocks."):
                scratch[parameter.rpartition(".")[2]] = 2 * values
        elif residency == "fp8" and becomes_fp8(network.shape, parameter, rows, values // rows):
            total += values + 4 * rows
        else:
            total += 2 * values
    return total + sum(scratch.values())
