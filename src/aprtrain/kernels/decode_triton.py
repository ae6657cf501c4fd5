"""The Triton kernel of decode.attend_one. Imported only on CUDA."""

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 64, 4
_LEAST = 16  # rows and columns of a product


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, out_ptr, first_ptr, place_ptr, scale, room, n_kv, group, size, values,
    GROUP: tl.constexpr, SIZE: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program handles the query heads of one key-value head in one row: softmax with a running maximum."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, end = tl.load(first_ptr + row), tl.load(place_ptr) + 1
    g, e, f, b = tl.arange(0, GROUP), tl.arange(0, SIZE), tl.arange(0, VALUES), tl.arange(0, BLOCK)
    heads = row * n_kv * group + head * group + g[:, None]
    is_head, is_key, is_value = (g < group)[:, None], e < size, f < values
    q = tl.load(q_ptr + heads * size + e, mask=is_head & is_key, other=0.0)
    most = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    mixed = tl.zeros([GROUP, VALUES], tl.float32)
    for start in range(first, end, BLOCK):
        place = (start + b)[:, None]
        is_seen = place < end
        at = (row * room + place) * n_kv + head
        k = tl.load(k_ptr + at * size + e, mask=is_seen & is_key, other=0.0)
        v = tl.load(v_ptr + at * values + f, mask=is_seen & is_value, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(tl.trans(is_seen), scores, float("-inf"))
        largest = tl.maximum(most, tl.max(scores, 1))
        weights, kept = tl.exp(scores - largest[:, None]), tl.exp(most - largest)
        total = total * kept + tl.sum(weights, 1)
        mixed = mixed * kept[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        most = largest
    out = (mixed / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + heads * values + f, out, mask=is_head & is_value)


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, first: torch.Tensor, place: torch.Tensor,
    scale: float,
) -> None:  # fmt: skip
    """Launches the kernel on the current stream; all tensors are contiguous. See `attend_one`."""
    n, room, n_kv, size = k.shape
    values, group = v.shape[-1], q.shape[2] // n_kv
    padded = [max(_LEAST, triton.next_power_of_2(x)) for x in (group, size, values)]
    with torch.cuda.device(q.device):
        _attend[(n, n_kv)](
            q, k, v, out, first, place, scale, room, n_kv, group, size, values, *padded, BLOCK=_BLOCK,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=_WARPS,
        )  # fmt: skip
