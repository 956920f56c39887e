"""Embedding and head shared by all pipeline stages: each has a part of the vocabulary.

    before a tick   ids_BS --own rows, psum over pp--> x_BSD, into the first virtual stage's ring
    after a tick    the last one's y_BSD to all --own logits, psum of their sums--> loss, own gradients, psum--> dy
                    the first one's dx_BSD to all --> own rows' gradients

So the head's work, the largest single product of the model, is done by S stages instead of one while S-1 wait, and its
weights, their gradients and their optimizer state are a part on each. Whether anything happens depends on the tick
alone, so all devices agree and the sums over pp meet. After Yeung et al. 2024 (arXiv:2411.05288).

Letters: U = V / pp, the part of the vocabulary here.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from moejax.models.head import IGNORED, HeadLoss, chunk_tokens
from moejax.models.transformer import Params, parts
from moejax.parallel.pipeline_ops import Carry, Inside, Row
from moejax.parallel.stage import add, add_losses

AXIS = "pp"


def before(inside: Inside, carry: Carry, row: Row) -> Carry:
    """The embedding that the first virtual stage reads in this tick, if it does."""

    def put(activations: Array) -> Array:
        ids = inside.microbatch(row["embed"]).tokens
        x = embed(inside, ids)
        there = lax.dynamic_index_in_dim(activations, row["embed_slot"], keepdims=False)
        mine = row["is_first"] & (row["embed"] >= 0)
        return lax.dynamic_update_index_in_dim(activations, jnp.where(mine, x, there), row["embed_slot"], axis=0)

    activations = lax.cond(row["embed"] >= 0, put, lambda ring: ring, carry.rings.activations)
    return carry._replace(rings=carry.rings._replace(activations=activations))


def after(inside: Inside, carry: Carry, row: Row, out: Array) -> Carry:
    """The loss of what the last virtual stage made in this tick, and the embedding's gradient from the first one's."""
    ends = ("embedding", "head")
    everywhere = lambda mine: lax.psum(jnp.where(mine, out.astype(jnp.float32), 0.0), AXIS).astype(out.dtype)  # noqa: E731

    def loss(state: tuple[Array, Params, Any]) -> tuple[Array, Params, Any]:
        cotangents, gradients, totals = state
        here = inside.microbatch(row["loss"])
        context = inside.context_of(row["loss"], here)
        dy, more, sums = head_loss(inside, everywhere(row["is_last"]), here.labels, 1.0 / context.loss_tokens)
        totals = add_losses(totals, sums)
        if not inside.training:
            return cotangents, gradients, totals
        there = lax.dynamic_index_in_dim(cotangents, row["loss_slot"], keepdims=False)
        value = jnp.where(row["is_last"], dy, there)
        cotangents = lax.dynamic_update_index_in_dim(cotangents, value, row["loss_slot"], axis=0)
        return cotangents, add(gradients, more), totals

    trained = {name: carry.gradients[name] for name in ends} if inside.training else {}
    state = (carry.rings.cotangents, trained, carry.totals)
    cotangents, trained, totals = lax.cond(row["loss"] >= 0, loss, lambda state: state, state)
    carry = Carry(carry.rings._replace(cotangents=cotangents), carry.gradients | trained, totals)
    if not inside.training:
        return carry

    def pull(gradients: Params) -> Params:
        ids = inside.microbatch(row["pull_embed"]).tokens
        return add(gradients, pull_embed(inside, ids, everywhere(row["is_first"])))

    embedding = lax.cond(row["pull_embed"] >= 0, pull, lambda g: g, carry.gradients["embedding"])
    return carry._replace(gradients=carry.gradients | {"embedding": embedding})


def _own_rows(table_UD: Array, ids: Array) -> tuple[Array, Array]:
    """Row of each id in this stage's part, and whether it is here."""
    row = ids - lax.axis_index(AXIS) * table_UD.shape[0]
    here = (row >= 0) & (row < table_UD.shape[0])
    return jnp.where(here, row, 0), here


def _looked_up(table_UD: Array, ids: Array) -> Array:
    row, here = _own_rows(table_UD, ids)
    return lax.psum(jnp.where(here[..., None], jnp.take(table_UD.astype(jnp.float32), row, axis=0), 0.0), AXIS)


def _finish(inside: Inside, params: Params, rows: Array) -> Array:
    """Scale and norm, as `models.head.Embedding` does after its look-up."""
    module = parts(inside.program.model).embedding(params)
    x = rows * module.scale
    return (module.norm(x) if hasattr(module, "norm") else x).astype(inside.program.compute)


def embed(inside: Inside, ids: Int[Array, "B S"]) -> Float[Array, "B S D"]:
    params = inside.params["embedding"]
    with jax.named_scope("embedding"):
        return _finish(inside, params, _looked_up(params["table"], ids))


def pull_embed(inside: Inside, ids: Int[Array, "B S"], dx: Float[Array, "B S D"]) -> Params:
    """This stage's part of the embedding's gradient; dx the same on all stages."""
    params = inside.params["embedding"]
    with jax.named_scope("embedding"):
        rows = _looked_up(params["table"], ids)
        _, pull = jax.vjp(lambda p, rows: _finish(inside, p, rows), params, rows)
        gradient, d_rows = pull(dx)
        first = lax.axis_index(AXIS) == 0  # what is whole on every stage is counted once
        gradient = jax.tree.map(lambda g: jnp.where(first, g, 0).astype(jnp.float32), gradient)
        row, here = _own_rows(params["table"], ids)
        table = jnp.zeros(params["table"].shape, jnp.float32)
        table = table.at[row].add(jnp.where(here[..., None], d_rows, 0.0))
        return gradient | {"table": table}


def head_loss(
    inside: Inside, y: Float[Array, "B S D"], labels_BS: Int[Array, "B S"], scale: Array
) -> tuple[Array, Params, HeadLoss]:
    """(dy, gradients of embedding and head, the sums), the loss as `models.head.linear_cross_entropy`, times scale.

    y: the same on all stages, as is dy. The sums stand on stage 0 alone, and are zero elsewhere.
    """
    model, p = inside.program.model, parts(inside.program.model)
    with jax.named_scope("head"):
        norm = lambda params, y: p.head(params).norm(y).reshape(-1, y.shape[-1])  # noqa: E731
        x_TD, pull_norm = jax.vjp(norm, inside.params["head"], y)
        weight = lambda head, embedding: p.head(head).weight_DV(p.embedding(embedding)).astype(y.dtype)  # noqa: E731
        w_DU, pull_weight = jax.vjp(weight, inside.params["head"], inside.params["embedding"])
        run = chunk_tokens(x_TD.shape[0], w_DU.shape[1])
        labels_T = labels_BS.reshape(-1)
        chunks = x_TD.reshape(-1, run, x_TD.shape[1]), labels_T.reshape(-1, run)

        def step(dw: Array, chunk: tuple[Array, Array]) -> tuple[Array, Any]:
            dx, more, sums = _chunk(*chunk, w_DU, model.z_loss, scale)
            return dw + more, (dx, sums)

        dw_DU, (dx, sums) = lax.scan(step, jnp.zeros(w_DU.shape, jnp.float32), chunks)
        # each stage's dx is what its own logits say; the norm's pull is linear, so it is summed after it
        d_head, dy = pull_norm(dx.reshape(x_TD.shape).astype(x_TD.dtype))
        dy = lax.psum(dy.astype(jnp.float32), AXIS).astype(y.dtype)
        d_head_weight, d_embedding = pull_weight(dw_DU.astype(w_DU.dtype))
        first = lax.axis_index(AXIS) == 0
        sums = jax.tree.map(lambda x: jnp.where(first, jnp.sum(x), 0.0), sums)
        gradients = {"head": add(d_head, d_head_weight), "embedding": d_embedding}
        return dy, gradients, sums


def _chunk(x_TD: Array, labels_T: Array, w_DU: Array, z_weight: float, scale: Array) -> tuple[Array, Array, HeadLoss]:
    """(this stage's part of dx, dw of its part of the vocabulary in fp32, the sums)."""
    logits_TU = jnp.matmul(x_TD, w_DU, preferred_element_type=jnp.float32)
    top_T = lax.pmax(jnp.max(logits_TU, axis=-1), AXIS)
    shifted_TU = jnp.exp(logits_TU - top_T[:, None])
    total_T = lax.psum(jnp.sum(shifted_TU, axis=-1), AXIS)
    log_sum_T = top_T + jnp.log(total_T)
    counted_T = labels_T != IGNORED
    row_T, here_T = _own_rows(w_DU.T, jnp.where(counted_T, labels_T, 0))
    picked_T = jnp.take_along_axis(logits_TU, row_T[:, None], axis=-1)[:, 0]
    picked_T = lax.psum(jnp.where(here_T, picked_T, 0.0), AXIS)
    sums = HeadLoss(
        jnp.sum(jnp.where(counted_T, log_sum_T - picked_T, 0.0)), jnp.sum(jnp.where(counted_T, log_sum_T**2, 0.0))
    )
    factor_T = jnp.where(counted_T, scale, 0.0)
    # d/dlogits of (log_sum - picked + z log_sum^2): softmax (1 + 2 z log_sum) - one-hot
    grad_TU = shifted_TU * (factor_T * (1.0 + 2.0 * z_weight * log_sum_T) / total_T)[:, None]
    grad_TU = grad_TU.at[jnp.arange(len(row_T)), row_T].add(-jnp.where(here_T, factor_T, 0.0))
    grad_TU = grad_TU.astype(x_TD.dtype)
    dx_TD = jnp.matmul(grad_TU, w_DU.T, preferred_element_type=jnp.float32)
    dw_DU = jnp.matmul(x_TD.T, grad_TU, preferred_element_type=jnp.float32)
    return dx_TD, dw_DU, sums
