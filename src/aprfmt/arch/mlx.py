"""mlx_lm's names, shapes and values of the tensors of the table's networks.

Most networks have the names of their checkpoints. If mlx_lm stacks experts or splits matrices, it has the tensors of a
GGUF under names of its own: a row of the table with other names on the GGUF side covers both.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache

from aprfmt.arch.grammar import has_layer, shape_of, sizes_of
from aprfmt.arch.hyperparams import Hyperparams
from aprfmt.arch.links import Link, RowMapping, link_of
from aprfmt.arch.mlx_networks import LANGUAGE, NETWORKS, ONLY_INSIDE, MlxNetwork
from aprfmt.arch.names import canonical_name, gguf_names, matches, spell
from aprfmt.arch.row import Architecture, TensorRow
from aprfmt.codecs.affine import PARTS
from aprfmt.types import Shape


@cache
def mlx_row(row: Architecture) -> Architecture:
    """The tensors of the `row` that differ in mlx_lm, as a row whose GGUF side has mlx_lm's names and shapes."""
    network = NETWORKS[row.id]
    own = {(name, tensor.layers) for tensor in network.tensors for name in tensor.hf}
    others = [tensor for tensor in row.tensors if (tensor.hf[0], tensor.layers) not in own]
    changed = {tensor: [*_changed(network, tensor)] for tensor in others}
    rows = (*network.tensors, *(part for parts in changed.values() for part in parts))
    named = {name for part in rows for name in part.hf}
    # The same name in other layers, where mlx_lm keeps it.
    kept = [_own(t, t.hf[0], t.hf[0], t.dims[0]) for t, parts in changed.items() if not parts and t.hf[0] in named]
    return replace(row, tensors=(*rows, *kept), prefixes=(), drafts=())


def _changed(network: MlxNetwork, tensor: TensorRow) -> Iterator[TensorRow]:
    """The row with mlx_lm's names in place of a GGUF's; none if it has the checkpoint's."""
    begin, layer, _ = tensor.hf[0].partition("{n}.")
    in_layer = [name.removeprefix("blk.{n}.") for name in tensor.gguf]
    if in_layer and not tensor.pack and all(name in network.stacked for name in in_layer):
        beginning = begin + layer if layer else ""
        yield replace(tensor, gguf=tuple(beginning + network.stacked[name] for name in in_layer))
        return
    dims = tensor.dims * (len(tensor.hf) // len(tensor.dims))
    for name, own in zip(tensor.hf, dims, strict=True):
        spelled = network.spell(name)
        scale = next((factors for ending, factors in network.scaled.items() if name.endswith(ending)), ())
        if "{e}" not in name and (spelled != name or scale):
            found = replace(_own(tensor, name, spelled, own), scale=scale)
            channels, *rest = own.split(",")
            yield replace(found, gguf_dims=(f"{channels},{rest[-1]},1",)) if network.is_convolution(name) else found


def _own(tensor: TensorRow, name: str, spelled: str, dims: str) -> TensorRow:
    """One tensor of a row, under mlx_lm's name."""
    return TensorRow((name,), (spelled,), (dims,), tensor.need, layers=tensor.layers)


def network_of(row: Architecture | None) -> MlxNetwork | None:
    """mlx_lm's network for a row of the table, None if it has none or its tensors are unknown."""
    return NETWORKS.get(row.id) if row is not None else None


def reshaped(row: Architecture, h: Hyperparams, name: str, shape: Shape, *, back: bool = False) -> RowMapping | None:
    """Maps the checkpoint's tensor `name` to mlx_lm's shape; `back`: mlx_lm's to the checkpoint's. The bytes stay.

    None for a tensor that has the same shape in both, or already has the other shape.
    """
    network = network_of(row)
    if network is None:
        return None
    if network.is_convolution(name):
        done = shape[-1:] == (1,)
        is_other = len(shape) == 3 and 1 in shape[1:] and done == back
        return RowMapping((shape,), ((shape[0], shape[2], shape[1]),), flat=True) if is_other else None
    dims = next((dims for ending, dims in network.reshaped.items() if name.endswith(ending)), None)
    if dims is None:
        return None
    before, after = (shape_of(text, sizes_of(h)) for text in (dims[::-1] if back else dims))
    new = tuple(size for size in after if size is not None)
    return RowMapping((shape,), (new,), flat=True) if shape == before and len(new) == len(after) else None


def is_mlx_name(row: Architecture, name: str) -> bool:
    """Whether `name` is that of a tensor, or of a part of a quantized weight, that only mlx_lm calls so."""
    if network_of(row) is None:
        return False
    module, _, last = name.rpartition(".")
    whole = f"{module}.weight" if last in PARTS else name
    if canonical_name(row, whole) is not None:  # a checkpoint's own, of a draft layer perhaps
        return False
    return any(matches(mlx_row(row), spelled, "gguf") for spelled in (whole, whole.removeprefix(LANGUAGE)))


def why_refused(row: Architecture, h: Hyperparams, names: Collection[str], *, wrapped: bool) -> str:
    """What mlx_lm lacks to read the network, "" if nothing; `names` are those of the checkpoint's tensors.

    `wrapped` tells whether the network is the language model of a wrapper.
    """
    network = NETWORKS[row.id]
    if row.id in ONLY_INSIDE and not wrapped:
        return f"mlx_lm has {h.hf_model_type or row.id} only as the language model inside a larger network"
    absent = network.absent if wrapped else (*network.absent, *network.absent_alone)
    if found := next((name for name in names if absent and name.endswith(absent)), None):
        return f"mlx_lm's network has no {found}"
    flag = next((name for name in network.off if h.extra.get(name)), None)
    return f"mlx_lm changes the values of the head if {flag} is true" if flag is not None else ""


def dropped_tensors(row: Architecture, h: Hyperparams, names: Collection[str]) -> list[str]:
    """The GGUF names of the tensors that mlx_lm dropped, if `names` are those of a folder that it wrote."""
    network = network_of(row)
    if network is None or not network.dropped or not any(is_mlx_name(row, name) for name in names):
        return []
    layers = range(h.num_layers or 0)
    rows = [tensor for tensor in row.tensors if tensor.hf[0].endswith((*network.dropped,))]
    return [
        name
        for tensor in rows
        for n in layers
        if has_layer(tensor.layers, h, n) and network.is_dropped(spell(tensor.hf[0], n), h)
        for name in gguf_names(tensor, n, h)
    ]


def link_from(row: Architecture, h: Hyperparams, name: str, shapes: Mapping[str, Shape]) -> Link | None:
    """The link of a tensor that only mlx_lm calls `name`, with its names and shapes on the GGUF side; None for others.

    `shapes` are those of the folder's tensors. Raises RefusedError as `link_of` does.
    """
    if network_of(row) is None or canonical_name(row, name) is not None:
        return None
    begin, found = "", matches(mlx_row(row), name, "gguf")
    if not found and name.startswith(LANGUAGE):
        begin, found = LANGUAGE, matches(mlx_row(row), name.removeprefix(LANGUAGE), "gguf")
    if not found:
        return None
    link = link_of(h, found[0], {name.removeprefix(begin): shapes[name]})
    return replace(link, gguf=tuple(begin + part for part in link.gguf)) if begin else link


def values_from(row: Architecture, h: Hyperparams, name: str, shapes: Mapping[str, Shape]) -> Link | None:
    """The link of a tensor with other values in a folder of mlx_lm, under the checkpoint's own name."""
    if network_of(row) is None:
        return None
    found = matches(mlx_row(row), name, "gguf")
    return link_of(h, found[0], {name: shapes[name]}) if found else None


def checkpoint_shapes(row: Architecture, h: Hyperparams, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The checkpoint's names and shapes of tensors under mlx_lm's names; all others unchanged."""
    out: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if (link := link_from(row, h, name, shapes)) is not None:
            out |= zip(link.hf, link.mapping.before, strict=True)
        elif (mapping := reshaped(row, h, name, shape, back=True)) is not None:
            out[name] = mapping.after[0]
        elif (own := values_from(row, h, name, shapes)) is not None and own.row.cut and own.mapping.after == (shape,):
            out[name] = own.mapping.before[0]
        else:
            out[name] = shape
    return out
