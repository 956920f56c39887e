"""The dense oracle: what a layer of experts computes, one token and one expert at a time, in float64 numpy.

    y_t = sum_k w_tk * expert_{ids_tk}(x_t),   expert(x) = (up * silu(gate)) @ w_down,  [up | gate] = x @ w_up_gate

Also the receive layout of Olmo-core 3's rowwise path, written as the loops its description has.
"""

from typing import NamedTuple

import numpy as np


class Case(NamedTuple):
    """One batch over all devices: A = devices * T tokens. kept: bool[A, K]; False for routes that no expert sees."""

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    w_up_gate: np.ndarray
    w_down: np.ndarray
    grad: np.ndarray
    kept: np.ndarray


class Answer(NamedTuple):
    y: np.ndarray
    dx: np.ndarray
    dweights: np.ndarray
    dw_up_gate: np.ndarray
    dw_down: np.ndarray


def dense(case: Case) -> Answer:
    """y, and the gradients of sum(y * grad)."""
    x, grad = np.nan_to_num(case.x.astype(np.float64)), case.grad.astype(np.float64)
    w_up_gate, w_down = case.w_up_gate.astype(np.float64), case.w_down.astype(np.float64)
    hidden = w_down.shape[1]
    y, dx, dweights = np.zeros_like(x), np.zeros_like(x), np.zeros(case.weights.shape)
    d_up_gate, d_down = np.zeros_like(w_up_gate), np.zeros_like(w_down)
    for expert in range(w_down.shape[0]):
        t, k = np.nonzero((case.ids == expert) & case.kept)
        w = case.weights[t, k].astype(np.float64)[:, None]
        up, gate = np.split(x[t] @ w_up_gate[expert], [hidden], axis=1)
        sigmoid = 1 / (1 + np.exp(-gate))
        inner = up * gate * sigmoid
        out = inner @ w_down[expert]
        np.add.at(y, t, w * out)
        dweights[t, k] = np.sum(out * grad[t], axis=1)
        d_out = w * grad[t]
        d_inner = d_out @ w_down[expert].T
        d_gate = d_inner * up * sigmoid * (1 + gate * (1 - sigmoid))
        d_both = np.concatenate([d_inner * gate * sigmoid, d_gate], axis=1)
        d_down[expert] = inner.T @ d_out
        d_up_gate[expert] = x[t].T @ d_both
        np.add.at(dx, t, d_both @ w_up_gate[expert].T)
    return Answer(y, dx, dweights, d_up_gate, d_down)


class Rows(NamedTuple):
    """Row of every route in the buffer of its expert's device: int[A, K], -1 for routes that go nowhere."""

    row: np.ndarray
    device: np.ndarray


def rowwise_rows(ids: np.ndarray, n_experts: int, devices: int, capacity: int | None = None) -> Rows:
    """Olmo-core 3's steps 2 to 4: counts, tail drop to `capacity` rows a device (None: no drop), destination rows."""
    tokens, per_device = ids.shape[0] // devices, n_experts // devices
    requested = np.zeros((devices, devices, per_device), int)  # [src, dst, l]
    for src in range(devices):
        for expert in ids[src * tokens : (src + 1) * tokens].reshape(-1):
            if expert < n_experts:
                requested[src, expert // per_device, expert % per_device] += 1
    keep = np.zeros_like(requested)
    for dst in range(devices):
        flat = requested[:, dst].T.reshape(-1)  # local expert major, then source
        ends = np.cumsum(flat) if capacity is None else np.minimum(np.cumsum(flat), capacity)
        keep[:, dst] = np.diff(ends, prepend=0).reshape(per_device, devices).T
    base = np.cumsum(keep.sum(0), axis=1) - keep.sum(0)  # [dst, l]
    before = np.cumsum(keep, axis=0) - keep  # rows of the sources before, [src, dst, l]
    row, device = np.full(ids.shape, -1), np.full(ids.shape, -1)
    for src in range(devices):
        seen = np.zeros(n_experts, int)
        for t in range(src * tokens, (src + 1) * tokens):
            for k, expert in enumerate(ids[t]):
                if expert >= n_experts:
                    continue
                dst, local = divmod(expert, per_device)
                if seen[expert] < keep[src, dst, local]:
                    row[t, k], device[t, k] = base[dst, local] + before[src, dst, local] + seen[expert], dst
                seen[expert] += 1
    return Rows(row, device)
