"""Decoding: the same blocks as in training, with the keys and values of past tokens kept.

    tokens [B, S], cache --`extend`--> logits at the last token of each row, cache     (a prompt, or one token more)
    logits --`sample`--> next token

A row's token at position p has its key and value in slot p of the cache, so padding at the end of a prompt is simply
overwritten by what is generated: a query at position p looks at slots 0..p and at nothing else.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from moejax.config import FULL_ATTENTION, ModelConfig
from moejax.context import Context
from moejax.models.attention import Attention
from moejax.models.transformer import Params, parts

NEVER = -1e30  # the score of a token that is not to be drawn


class Cache(NamedTuple):
    """Keys and values of every layer: [L, B, P, M, H], P positions, in the dtype of the activations."""

    keys: Float[Array, "L B P M H"]
    values: Float[Array, "L B P M H"]


def empty_cache(config: ModelConfig, batch: int, positions: int, dtype: jnp.dtype) -> Cache:
    a = config.attention
    shape = (config.n_layers, batch, positions, a.n_kv_heads, a.head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def _attend(
    attention: Attention, x: Float[Array, "B S D"], positions: Int[Array, "B S"], window: Int[Array, ""], cache: Cache
) -> tuple[Float[Array, "B S D"], Cache]:
    """Attention over the cache of one layer, [B, P, M, H], after the new keys and values are put in."""
    q, k, v = attention.project(x, positions)
    rows = jnp.arange(x.shape[0])[:, None]
    cache = Cache(*(old.at[rows, positions].set(new.astype(old.dtype)) for old, new in zip(cache, (k, v), strict=True)))
    distance = positions[:, :, None] - jnp.arange(cache.keys.shape[1])
    mask = (distance >= 0) & ((window == FULL_ATTENTION) | (distance < window))
    y = jax.nn.dot_product_attention(q, cache.keys, cache.values, mask=mask[:, None], implementation="xla")
    return jnp.einsum("bsnh,nhd->bsd", y, attention.w_out[...].astype(x.dtype)), cache


def extend(
    config: ModelConfig,
    params: Params,
    tokens: Int[Array, "B S"],
    first: Int[Array, "B"],
    lengths: Int[Array, "B"],
    cache: Cache,
    context: Context,
) -> tuple[Float[Array, "B V"], Cache]:
    """fp32 logits after token lengths - 1 of each row, and the cache with all of them in it.

    tokens: row b holds `lengths[b]` tokens and then padding. first: position of its first token. context: its
    segment_ids are -1 for padding, which is routed nowhere; its positions are not used. `first + S` must not exceed the
    positions of the cache.
    """
    p = parts(config)
    positions = first[:, None] + jnp.arange(tokens.shape[1])
    embedding = p.embedding(params["embedding"])
    x = embedding(tokens, cache.keys.dtype)
    window_L = jnp.asarray(config.windows, jnp.int32)
    new = []
    for name, (part, start, count) in p.stacks().items():

        def step(x: Array, layer: tuple[Params, Array, Array, Cache], part=part) -> tuple[Array, Cache]:
            block_params, window, index, kept = layer
            block, box = part(block_params), [kept]

            def attend(inside: Array) -> Array:
                y, box[0] = _attend(block.attention, inside, positions, window, kept)
                return y

            y, _ = block.around(attend, x, context.for_layer(index))
            return y, box[0]

        here = slice(start, start + count)
        kept = jax.tree.map(lambda c, here=here: c[here], cache)
        x, kept = lax.scan(step, x, (params[name], window_L[here], start + jnp.arange(count), kept))
        new.append(kept)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return p.head(params["head"]).logits(last, embedding), jax.tree.map(lambda *c: jnp.concatenate(c), *new)


def restrict(logits: Float[Array, "B V"], top_k: int, top_p: float) -> Float[Array, "B V"]:
    """Logits with all but the `top_k` likeliest tokens (0: all), and of those all but the fewest whose probabilities
    sum to at least `top_p`, set to NEVER; the likeliest always stays. Ties at the edge stay together."""
    ordered = -jnp.sort(-logits, axis=-1)
    if top_k:
        logits = jnp.where(logits < ordered[:, min(top_k, logits.shape[-1]) - 1 :][:, :1], NEVER, logits)
        ordered = -jnp.sort(-logits, axis=-1)
    if top_p < 1.0:
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # of the likelier ones
        kept: Bool[Array, "B V"] = (before < top_p).at[:, 0].set(True)
        smallest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits < smallest, NEVER, logits)
    return logits


def sample(
    logits: Float[Array, "B V"],
    key: Array,
    rows: Int[Array, "B"],
    step: Int[Array, ""],
    temperature: float,
    top_k: int,
    top_p: float,
) -> Int[Array, "B"]:
    """One token per row: the likeliest at temperature 0, else drawn from softmax(restricted logits / temperature).

    rows: index of each row in the whole batch. The draw depends on key, row and step alone, on every mesh.
    """
    if temperature == 0.0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scaled = restrict(logits / temperature, top_k, top_p)
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), step))(rows)
    return jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)
