"""Tokens through experts: the rounds, and their gradient.

    forward    rounds 1, 2, ... in a loop, nothing kept   then round 0 with what its backward needs   y = their sum
    backward   round 0 from what was kept                 then rounds 1, 2, ... again, each pulled back at once

A round fills every device's buffer of R rows at most once; the number of rounds is agreed by the group and is 1 unless
a buffer would overflow. So every token sees its experts under any routing, memory is that of one round, and a batch
that fits pays for nothing but a loop that does not turn. Argument and figures: docs/decisions/001-exactly-dropless.md.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, PyTree

from moejax.models.quantised import MXRecipe
from moejax.moe.dispatch import Plan, Traffic, Transport
from moejax.moe.mx_experts import mx_round

# experts(params, rows_RD, group_sizes_e) -> rows_RD; a plain function, its weights passed in
Experts = Callable[[Any, Any, Array], Array]


def through_experts(
    transport: Transport,
    experts: Experts | MXRecipe,
    params: PyTree[Array],
    x_TD: Float[Array, "T D"],
    expert_ids_TK: Int[Array, "T K"],
    weights_TK: Float[Array, "T K"],
    n_experts: int,
    quantised: PyTree[Array] = None,
) -> tuple[Float[Array, "T D"], Traffic]:
    """y_t = sum_k weights_tk * expert_{ids_tk}(x_t), in the dtype of x, and what the buffers saw.

    Exact gradients in params, x and weights; with an `MXRecipe` for experts, which takes their weights from `quantised`
    and reads no params, those of the recipe. Inside a region that is manual over the transport's mesh axis.
    """
    with jax.named_scope("plan"):
        plan = transport.plan(expert_ids_TK, n_experts)
    if plan.rounds is None:
        y_TD = _one_round(transport, experts, x_TD, weights_TK, params, quantised, plan, 0)
    else:
        y_TD = _all_rounds(transport, experts, x_TD, weights_TK, params, quantised, plan)
    return y_TD.astype(x_TD.dtype), plan.traffic


def _one_round(
    transport: Transport,
    experts: Experts | MXRecipe,
    x_TD: Array,
    weights_TK: Array,
    params: Any,
    quantised: Any,
    plan: Plan,
    round: Any,
) -> Float[Array, "T D"]:
    if isinstance(experts, MXRecipe):
        return mx_round(experts, transport, x_TD, weights_TK, params, quantised, plan, round)
    with jax.named_scope("dispatch"):
        arrivals = transport.dispatch(x_TD, plan, round)
    with jax.named_scope("experts"):
        rows_RD = experts(params, arrivals.rows, arrivals.group_sizes)
    with jax.named_scope("combine"):
        return transport.combine(rows_RD, weights_TK, plan, round)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _all_rounds(
    transport: Transport, experts: Any, x_TD: Array, weights_TK: Array, params: Any, quantised: Any, plan: Plan
) -> Array:
    return _rounds_from(0, transport, experts, x_TD, weights_TK, params, quantised, plan)


def _rounds_from(
    first: int,
    transport: Transport,
    experts: Any,
    x_TD: Array,
    weights_TK: Array,
    params: Any,
    quantised: Any,
    plan: Plan,
) -> Array:
    def more(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        # the barrier makes x vary with the round: XLA would else gather, and keep, its rows once before the loop
        (round, y_TD), x = carry, x_TD
        round, x = lax.optimization_barrier((round, x))
        return round + 1, y_TD + _one_round(transport, experts, x, weights_TK, params, quantised, plan, round)

    zero = (jnp.asarray(first, jnp.int32), jnp.zeros(x_TD.shape, jnp.float32))
    with jax.named_scope("rounds"):
        return lax.while_loop(lambda carry: carry[0] < _rounds(plan), more, zero)[1]


def _rounds(plan: Plan) -> Array:
    assert plan.rounds is not None
    return plan.rounds


def _all_rounds_forward(
    transport: Transport, experts: Any, x_TD: Array, weights_TK: Array, params: Any, quantised: Any, plan: Plan
) -> tuple[Array, Any]:
    # the further rounds first, and round 0 held back until they are done: what it keeps is not there yet while they
    # need their buffers
    y_TD = _rounds_from(1, transport, experts, x_TD, weights_TK, params, quantised, plan)
    later_x_TD, y_TD = lax.optimization_barrier((x_TD, y_TD))

    def round_0(x: Array, weights: Array, params: Any) -> Array:
        return _one_round(transport, experts, x, weights, params, quantised, plan, 0)

    y_0_TD, pull = jax.vjp(round_0, later_x_TD, weights_TK, params)
    return y_TD + y_0_TD, (pull, x_TD, weights_TK, params, quantised, plan)


def _all_rounds_backward(transport: Transport, experts: Any, residuals: Any, grad_TD: Array) -> Any:
    pull, x_TD, weights_TK, params, quantised, plan = residuals
    grad_x, *grad_rest = pull(grad_TD)
    # a token's routes may lie in several rounds: the sum of its gradient stays in fp32
    gradients = (grad_x.astype(jnp.float32), *grad_rest)

    def more(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        round, gradients = carry
        round, x, grad = lax.optimization_barrier((round, x_TD, grad_TD))

        def again(x: Array, weights: Array, params: Any) -> Array:
            return _one_round(transport, experts, x, weights, params, quantised, plan, round)

        _, pull = jax.vjp(again, x, weights_TK, params)
        return round + 1, jax.tree.map(lambda total, part: total + part.astype(total.dtype), gradients, pull(grad))

    start = (jnp.ones((), jnp.int32), gradients)
    with jax.named_scope("rounds"):
        _, (grad_x, *grad_rest) = lax.while_loop(lambda carry: carry[0] < _rounds(plan), more, start)
    return grad_x.astype(x_TD.dtype), *grad_rest, None, None


_all_rounds.defvjp(_all_rounds_forward, _all_rounds_backward)
