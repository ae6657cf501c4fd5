"""Orthogonal matching pursuit: vectors as sparse combinations of others (Pati et al. 1993).

Atoms are chosen one after the other, by the largest cosine with what the chosen ones do not explain. As in batch OMP
(Rubinstein et al. 2008), the products of residual and atoms are updated by the Gram matrix, without the residual.

Shape suffixes: T targets, N atoms, D dimensions, B targets of a batch, M candidates of a target, K chosen atoms.
"""

from __future__ import annotations

from aprfmt.types import Array

CANDIDATES = 256
"""Atoms of the largest cosine with a target, among which its atoms are chosen."""

_SEARCHED, _SOLVED = 512, 64  # targets at a time
_EXPLAINED = 1e-6  # cosine of a residual with an atom, relative to the target
_INDEPENDENT = 1e-4  # squared share of an atom that the chosen ones do not explain


def matching_pursuit(targets_TD: Array, atoms_ND: Array, k: int) -> tuple[Array, Array]:
    """At most `k` atoms for each target: their indices [T, K], int64, and coefficients [T, K], float32.

    A target that fewer atoms explain has coefficients 0 for the others; a target or an atom of zeros is not used.
    """
    import numpy as np

    norms_N = np.linalg.norm(atoms_ND, axis=1)
    unit_ND = atoms_ND / np.where(norms_N > 0, norms_N, 1)[:, None]
    k, m = min(k, *atoms_ND.shape), min(CANDIDATES, len(atoms_ND))
    index_TK, weight_TK = np.zeros((len(targets_TD), k), np.int64), np.zeros((len(targets_TD), k), np.float32)
    for start in range(0, len(targets_TD), _SEARCHED):
        some = targets_TD[start : start + _SEARCHED]
        near = np.abs(some @ unit_ND.T)
        near = np.argpartition(near, len(atoms_ND) - m, axis=1)[:, len(atoms_ND) - m :]
        for at in range(0, len(some), _SOLVED):
            y_BD, near_BM = some[at : at + _SOLVED], near[at : at + _SOLVED]
            picked_BK, is_used_BK = _choose(y_BD, unit_ND[near_BM], k)
            index_BK = np.take_along_axis(near_BM, picked_BK, 1)
            rows = slice(start + at, start + at + len(y_BD))
            index_TK[rows] = index_BK
            weight_TK[rows] = _least_squares(y_BD, atoms_ND[index_BK], is_used_BK)
    return index_TK, weight_TK


def _choose(y_BD: Array, unit_BMD: Array, k: int) -> tuple[Array, Array]:
    """The candidates that are chosen [B, K], and which of them are used."""
    import numpy as np

    n, m = unit_BMD.shape[:2]
    gram_BMM, product_BM = unit_BMD @ unit_BMD.transpose(0, 2, 1), (unit_BMD @ y_BD[:, :, None])[:, :, 0]
    basis_BKM = np.zeros((n, k, m), np.float32)  # products of the atoms with the orthonormalized chosen ones
    picked_BK, is_used_BK = np.zeros((n, k), np.int64), np.zeros((n, k), bool)
    is_free_BM, every = np.ones((n, m), bool), np.arange(n)
    least_B = _EXPLAINED * np.linalg.norm(y_BD, axis=1)
    for j in range(k):
        pick_B = np.argmax(np.abs(product_BM) * is_free_BM, axis=1)
        is_free_BM[every, pick_B] = False
        own_BM = gram_BMM[every, pick_B] - (basis_BKM[every, :j, pick_B][:, None] @ basis_BKM[:, :j])[:, 0]
        share_B, gain_B = own_BM[every, pick_B], product_BM[every, pick_B]
        used_B = (share_B > _INDEPENDENT) & (np.abs(gain_B) > least_B)
        scale_B = np.where(used_B, 1 / np.sqrt(np.where(used_B, share_B, 1)), 0)
        own_BM = own_BM * scale_B[:, None]
        product_BM = product_BM - own_BM * (gain_B * scale_B)[:, None]
        basis_BKM[:, j], picked_BK[:, j], is_used_BK[:, j] = own_BM, pick_B, used_B
    return picked_BK, is_used_BK


def _least_squares(y_BD: Array, chosen_BKD: Array, is_used_BK: Array) -> Array:
    """The coefficients of the used atoms [B, K], by the normal equations in float64."""
    import numpy as np

    a_BKD = chosen_BKD.astype(np.float64) * is_used_BK[:, :, None]
    gram_BKK = a_BKD @ a_BKD.transpose(0, 2, 1)
    diagonal = np.arange(gram_BKK.shape[1])
    gram_BKK[:, diagonal, diagonal] += ~is_used_BK
    found: Array = np.linalg.solve(gram_BKK, a_BKD @ y_BD[:, :, None].astype(np.float64))[:, :, 0]
    return found.astype(np.float32)
