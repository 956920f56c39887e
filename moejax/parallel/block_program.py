"""One block taken apart, so that its backward can run at another time than its forward, and in two pieces.

    forward          params, x, known --> y
    keep             params, x, known --> y, kept                        kept: what the backward needs of the forward
    pull             params, known, kept, dy --> dx, d_params
    pull_input       params, known, kept, dy --> dx, between             between: what the weight gradients need besides
    pull_weight      params, known, kept, between --> d_params

`jax.vjp` of the block is traced once to a jaxpr and cut by looking at what depends on what. Of the values its backward
asks for, those that follow from weights and from what is known of the microbatch (masks, rotary angles, casts of
weights) are computed again; so weights are never copied into a stash. The pull is cut into the equations that lead to
dx, and the rest; what crosses the cut is kept where it was dear to compute (matrix products, exchanges, loops), and
computed again where it was cheap. Values in MXFP8 count as dear: they are smaller than what they were made
from. After Qi et al. 2023 (arXiv:2401.10241), who make the same cut by hand in each linear
layer.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
from jax import Array
from jax.extend import core
from jaxtyping import PyTree

from moejax.models.quantised import QUANTISED

# Primitives whose results are kept rather than computed again: products, exchanges, loops, sorts, kernels.
DEAR = re.compile(
    r"dot_general|conv_general.*|scaled_.*|.*ragged.*|scan|while|cond|.*all_gather.*|.*all_to_all.*|psum.*|pmax.*|reduce_scatter"
    r"|ppermute|sort|top_k|approx_top_k|custom_vjp_call.*|pallas_call|mosaic_.*|.*callback|ffi_call|shard_map|random_.*"
    r"|dot_product_attention.*"  # cuDNN's
)
CALLS = ("jit", "pjit", "eval_jaxpr", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call")
LOOPS = ("scan", "while", "cond")


class Shape(NamedTuple):
    shape: tuple[int, ...]
    dtype: Any


class BlockProgram:
    """See the module. `block(params, x, known) -> ((y, loss), statistics)`; the scalar loss has cotangent 1.

    params, x, known: pytrees of arrays or tracers, for their shapes. Make it inside the region in which it runs.
    kept, between: shape and dtype of each array that `keep` and `pull_input` hand on.
    """

    def __init__(self, block: Callable[..., Any], params: PyTree[Any], x: Any, known: PyTree[Any]):
        leaves, tree = jax.tree.flatten(jax.tree.map(jax.typeof, (params, known)))
        self._x = jax.typeof(x)
        found: dict[str, Any] = {}

        def forward(at_hand: list[Any], x: Any) -> Any:
            params, known = jax.tree.unflatten(tree, at_hand)
            out, pull, statistics = jax.vjp(lambda p, x: block(p, x, known), params, x, has_aux=True)
            residuals, found["pull"] = jax.tree.flatten(pull)
            outputs, found["out"] = jax.tree.flatten((out, statistics))
            return outputs, residuals

        jaxpr, self._constants = _trace(forward, leaves, self._x)
        self._out, self._pull_tree = found["out"], found["pull"]
        residuals = jaxpr.outvars[self._out.num_leaves :]
        reached = _reached(jaxpr, jaxpr.invars[-1:])
        kept = _cheapest(
            jaxpr,
            [v for v in _variables(residuals) if v in reached],
            set(jaxpr.invars[:-1]) | _unreached(jaxpr, reached),
        )
        self.kept = [Shape(v.aval.shape, v.aval.dtype) for v in kept]
        self._keep = _slice(jaxpr, [*jaxpr.outvars[: self._out.num_leaves], *kept], jaxpr.invars)
        self._again = _slice(jaxpr, residuals, [*jaxpr.invars[:-1], *kept])
        self._residuals = [atom.aval for atom in residuals]
        self._pieces: tuple[core.Jaxpr, core.Jaxpr, list[Any]] | None = None

    def keep(self, params: PyTree[Array], x: Array, known: PyTree[Array]) -> tuple[Any, list[Array]]:
        """(((y, loss), statistics), kept)."""
        outputs = run(self._keep, [*self._constants, *jax.tree.leaves((params, known)), x])
        n = self._out.num_leaves
        return jax.tree.unflatten(self._out, outputs[:n]), outputs[n:]

    def pull(self, params: PyTree[Array], known: PyTree[Array], kept: list[Array], dy: Array) -> tuple[Array, Any]:
        """(dx, d_params)."""
        d_params, dx = self._pull(self._rebuild(params, known, kept), dy)
        return dx, d_params

    def _rebuild(self, params: PyTree[Array], known: PyTree[Array], kept: list[Array]) -> list[Any]:
        return run(self._again, [*self._constants, *jax.tree.leaves((params, known)), *kept])

    def _pull(self, residuals: list[Any], dy: Array) -> Any:
        return jax.tree.unflatten(self._pull_tree, residuals)((dy, jnp.ones((), jnp.float32)))

    # --- in two pieces ---------------------------------------------------------------------------------------------

    def split(self) -> list[Shape]:
        """Shape and dtype of each array between the two pieces of the pull."""
        self._cut()
        return self._between

    def _cut(self) -> tuple[core.Jaxpr, core.Jaxpr, list[Any]]:
        """The two pieces, made once, and their constants."""
        if self._pieces is None:
            found: dict[str, Any] = {}

            def whole(residuals: list[Any], dy: Any) -> Any:
                d_params, dx = self._pull(residuals, dy)
                leaves, found["tree"] = jax.tree.flatten(d_params)
                return dx, leaves

            closed, inner = _trace(whole, self._residuals, self._x)
            jaxpr, outer = _trace(lambda *values: run_opened(closed, values), *[v.aval for v in closed.invars])
            self._weights = found["tree"]
            *residuals, dy = jaxpr.invars
            dx, *weights = jaxpr.outvars
            first = {id(e) for e in _slice(jaxpr, [dx], jaxpr.invars).eqns}
            between = _cheapest(jaxpr, _variables(weights), set(residuals), first, _read_by(jaxpr, first, dx))
            self._between = [Shape(v.aval.shape, v.aval.dtype) for v in between]
            pieces = _slice(jaxpr, [dx, *between], jaxpr.invars), _slice(jaxpr, weights, [*residuals, *between])
            self._pieces = (*pieces, [*outer, *inner])
        return self._pieces

    def pull_input(
        self, params: PyTree[Array], known: PyTree[Array], kept: list[Array], dy: Array
    ) -> tuple[Array, list[Array]]:
        """(dx, between)."""
        first, _, constants = self._cut()
        dx, *between = run(first, [*constants, *self._rebuild(params, known, kept), dy])
        return dx, between

    def pull_weight(self, params: PyTree[Array], known: PyTree[Array], kept: list[Array], between: list[Array]) -> Any:
        """d_params."""
        _, second, constants = self._cut()
        leaves = run(second, [*constants, *self._rebuild(params, known, kept), *between])
        return jax.tree.unflatten(self._weights, leaves)


# --- jaxprs --------------------------------------------------------------------------------------------------------


def _trace(function: Callable[..., Any], *inputs: Any) -> tuple[core.Jaxpr, list[Any]]:
    """A jaxpr whose constants have become its leading inputs, and these constants."""
    closed = jax.make_jaxpr(function)(*inputs)
    jaxpr = closed.jaxpr
    return _with(jaxpr, [*jaxpr.constvars, *jaxpr.invars], jaxpr.outvars, jaxpr.eqns), list(closed.consts)


def _with(jaxpr: core.Jaxpr, inputs: list[Any], outputs: list[Any], equations: list[Any]) -> core.Jaxpr:
    return core.Jaxpr([], inputs, outputs, equations, jaxpr.effects, jaxpr.debug_info.with_unknown_names())


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _inner(equation: core.JaxprEqn) -> tuple[core.Jaxpr, list[Any]]:
    inside: Any = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    return (inside.jaxpr, inside.consts) if hasattr(inside, "consts") else (inside, [])


def _dear(equation: core.JaxprEqn) -> bool:
    if equation.primitive.name == "name":
        return equation.params["name"] == QUANTISED
    if equation.primitive.name in CALLS:
        return any(map(_dear, _inner(equation)[0].eqns))
    return DEAR.fullmatch(equation.primitive.name) is not None


def _slice(jaxpr: core.Jaxpr, wanted: Sequence[Any], given: Sequence[Any]) -> core.Jaxpr:
    """The equations that lead from `given` to `wanted`, in order."""
    there = set(given)
    needed, chosen = set(_variables(wanted)) - there, []
    for equation in reversed(jaxpr.eqns):
        if needed & set(equation.outvars):
            chosen.append(equation)
            needed |= set(_variables(equation.invars)) - there
    return _with(jaxpr, list(given), list(wanted), chosen[::-1])


def _reached(jaxpr: core.Jaxpr, sources: Sequence[Any]) -> set[Any]:
    """Everything that depends on the sources, they included."""
    reached = set(sources)
    for equation in jaxpr.eqns:
        if reached & set(_variables(equation.invars)):
            reached |= set(equation.outvars)
    return reached


def _unreached(jaxpr: core.Jaxpr, reached: set[Any]) -> set[Any]:
    return {v for equation in jaxpr.eqns for v in equation.outvars if v not in reached}


def _read_by(jaxpr: core.Jaxpr, equations: set[int], output: Any) -> set[Any]:
    return {output}.union(*(_variables(e.invars) for e in jaxpr.eqns if id(e) in equations))


def _cheapest(
    jaxpr: core.Jaxpr,
    wanted: Sequence[Any],
    free: set[Any],
    first: set[int] | None = None,
    used: set[Any] | None = None,
) -> list[Any]:
    """What has to be kept so that `wanted` follows from it and from `free` by cheap equations alone.

    first: only these equations have run when the keeping is done; all others run later anyway. used: what they read. A
    loop whose output they do not read is run again: it makes weight gradients, and those are not to be kept.
    """
    made_by = {v: equation for equation in jaxpr.eqns for v in equation.outvars}
    keep: dict[Any, None] = {}
    seen: set[Any] = set()
    waiting = list(reversed(wanted))
    while waiting:
        v = waiting.pop()
        if v in seen or v in free:
            continue
        seen.add(v)
        equation = made_by.get(v)
        if equation is None:
            keep[v] = None
            continue
        ran = first is None or id(equation) in first
        for_others = used is not None and v not in used and equation.primitive.name in LOOPS
        if ran and _dear(equation) and not for_others:
            keep[v] = None
        else:
            waiting += reversed(_variables(equation.invars))
    return list(keep)


def run(jaxpr: core.Jaxpr, values: Sequence[Any]) -> list[Any]:
    return list(jax.core.eval_jaxpr(jaxpr, (), *values))


def run_opened(jaxpr: core.Jaxpr, values: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr, calls inside it opened, recomputed regions included."""
    at: dict[Any, Any] = dict(zip(jaxpr.invars, values, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else at[atom]

    for equation in jaxpr.eqns:
        inputs = [read(atom) for atom in equation.invars]
        if equation.primitive.name in CALLS:
            inside, constants = _inner(equation)
            opened = _with(inside, [*inside.constvars, *inside.invars], inside.outvars, inside.eqns)
            outputs = run_opened(opened, [*constants, *inputs])
        else:
            whole = _with(jaxpr, _variables(equation.invars), list(equation.outvars), [equation])
            outputs = run(
                whole,
                [
                    value
                    for value, atom in zip(inputs, equation.invars, strict=True)
                    if not isinstance(atom, core.Literal)
                ],
            )
        at.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]
