"""Weights and FLOPs equal every published figure to its printed digit, the built model, and their own sums."""

import dataclasses
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.accounting import (
    FlopsPerToken,
    attended_keys,
    block_flops_per_token,
    block_parameters,
    flops_per_token,
    mfu,
    parameter_counts,
    teraflops,
)
from moejax.config import FULL_ATTENTION, AttentionConfig, ModelConfig, MoEConfig, NormPlacement, QKNorm
from moejax.config_io import load
from moejax.errors import UserError
from moejax.models.attention import attention_mask
from moejax.models.transformer import abstract_params

CONFIGS = Path(__file__).parents[1] / "configs"
SCALE = {"M": 1e6, "B": 1e9, "T": 1e12, "": 1.0}

# active and total weights as Ai2's README prints them, and FLOPs per token at 8,192 by its benchmark's formula
PUBLISHED = {
    "tiny_64e": ("1.59B", "12.91B", "9.90B"),
    "small_64e": ("4.29B", "40.86B", "29.05B"),
    "medium_64e": ("7.37B", "70.22B", "50.23B"),
    "medium_96e": ("7.38B", "103.75B", "50.25B"),
    "medium_128e": ("7.38B", "137.27B", "50.28B"),
    "large_128e": ("15.14B", "295.99B", "100.19B"),
    "ultra_128e": ("58.36B", "1.200T", "371.8B"),
    "ultra_256e": ("58.41B", "2.380T", "372.1B"),
    "moe_8l_8e": ("3.171B", "4.580B", "18.171B"),
    "moe_8l_32e": ("3.172B", "13.037B", "18.175B"),
    "moe_8l_48e": ("3.172B", "18.674B", "18.178B"),
    "moe_8l_64e": ("3.173B", "24.312B", "18.181B"),
    "moe_8l_128e": ("3.175B", "46.863B", "18.192B"),
}


def printed_as(value: float, published: str) -> str:
    """`value` with the digits and the unit of `published`."""
    number, unit = re.fullmatch(r"([\d.,]+)([MBT]?)", published).groups()
    decimals = len(number.partition(".")[2])
    return f"{value / SCALE[unit]:{',' if ',' in number else ''}.{decimals}f}{unit}"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures_to_the_printed_digit(name):
    active, total, flops = PUBLISHED[name]
    config = load(CONFIGS / f"{name}.yaml")
    counts = parameter_counts(config.model)
    assert printed_as(counts.active, active) == active
    assert printed_as(counts.total, total) == total
    assert printed_as(flops_per_token(config.model, config.data.sequence_length).total, flops) == flops


def test_olmoe_1b_7b_as_in_its_paper():
    counts = parameter_counts(load(CONFIGS / "olmoe_1b_7b.yaml").model)
    assert printed_as(counts.active, "1.3B") == "1.3B"
    assert printed_as(counts.total, "6.9B") == "6.9B"
    assert printed_as(counts.embedding, "103M") == "103M"
    assert counts.total == 6_919_161_856  # the weights of allenai/OLMoE-1B-7B-0924


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_head_comment_of_every_configuration_states_its_size(path):
    active, total = re.search(r"([\d.,]+[MBT]) active, ([\d.,]+[MBT]) total", path.read_text()).groups()
    counts = parameter_counts(load(path).model)
    assert (printed_as(counts.active, active), printed_as(counts.total, total)) == (active, total)


@pytest.mark.parametrize(
    ("name", "tokens_per_second", "tflops"),
    [("moe_8l_128e", 52_000, 946), ("moe_8l_128e", 19_400, 353), ("ultra_128e", 2_308, 858)],
)
def test_published_throughput_gives_the_derived_tflops(name, tokens_per_second, tflops):
    flops = flops_per_token(load(CONFIGS / f"{name}.yaml").model, 8192)
    assert round(teraflops(flops, tokens_per_second)) == tflops
    assert round(mfu(flops, 8 * tokens_per_second, peak_teraflops=2 * tflops, devices=8), 2) == 0.5


# --- against the model that is built ---------------------------------------------------------------------------------


def built_total(model: ModelConfig) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(model)))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_total_is_the_number_of_weights_of_the_built_model(path):
    model = load(path).model
    assert parameter_counts(model).total == built_total(model)


VARIANTS = {
    "reordered": ModelConfig(norm_placement=NormPlacement.reordered),
    "pre": ModelConfig(norm_placement=NormPlacement.pre),
    "no_qk_norm": ModelConfig(attention=AttentionConfig(qk_norm=QKNorm.none)),
    "full_qk_norm": ModelConfig(attention=AttentionConfig(n_heads=6, n_kv_heads=3, head_dim=10, qk_norm=QKNorm.full)),
    "tied": ModelConfig(tie_embeddings=True, embed_norm=False),
    "no_shared": ModelConfig(moe=MoEConfig(shared_hidden=0)),
    "all_dense": ModelConfig(n_layers=2, n_dense_layers=2, dense_hidden=72),
    "no_dense": ModelConfig(n_dense_layers=0, moe=MoEConfig(num_experts=3, top_k=3, hidden=24, shared_hidden=40)),
    "windowed": ModelConfig(attention=AttentionConfig(window_pattern=(16, 32, -1))),
}


@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)
def test_total_is_that_of_the_built_model_for_every_structure(model):
    assert parameter_counts(model).total == built_total(model)


# --- against itself --------------------------------------------------------------------------------------------------


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    size = st.integers(1, 40)
    kv, experts, layers = draw(st.integers(1, 4)), draw(st.integers(1, 12)), draw(st.integers(1, 6))
    return ModelConfig(
        d_model=draw(size),
        n_layers=layers,
        n_dense_layers=draw(st.integers(0, layers)),
        dense_hidden=draw(st.none() | size),
        vocab_size=draw(size),
        norm_placement=draw(st.sampled_from(NormPlacement)),
        embed_norm=draw(st.booleans()),
        attention=AttentionConfig(
            n_heads=kv * draw(st.integers(1, 4)),
            n_kv_heads=kv,
            head_dim=2 * draw(size),
            qk_norm=draw(st.sampled_from(QKNorm)),
            window_pattern=tuple(draw(st.lists(st.just(FULL_ATTENTION) | st.integers(1, 80), max_size=4))),
            full_first=draw(st.booleans()),
            full_last=draw(st.booleans()),
        ),
        moe=MoEConfig(
            num_experts=experts,
            top_k=draw(st.integers(1, experts)),
            hidden=draw(size),
            shared_hidden=draw(st.integers(0, 40)),
        ),
    )


@given(models())
@settings(derandomize=True, deadline=None)
def test_active_is_the_total_of_the_model_left_with_the_experts_a_token_reaches(model):
    few = dataclasses.replace(model, moe=dataclasses.replace(model.moe, num_experts=model.moe.top_k))
    routes_lost = model.n_moe_layers * model.d_model * (model.moe.num_experts - model.moe.top_k)
    # the width of a null dense_hidden does not depend on num_experts, so nothing else changes
    assert parameter_counts(model).active == parameter_counts(few).total + routes_lost


@given(models(), st.integers(1, 64))
@settings(derandomize=True, deadline=None)
def test_every_matrix_costs_six_flops_per_active_weight(model, length):
    counts, flops = parameter_counts(model), flops_per_token(model, length)
    assert flops.total - flops.attention_scores == 6 * (counts.active - counts.embedding - counts.norms)


@given(models(), st.integers(1, 64))
@settings(derandomize=True, deadline=None)
def test_blocks_and_ends_add_up(model, length):
    counts, flops = parameter_counts(model), flops_per_token(model, length)
    blocks = [block_parameters(model, layer) for layer in range(model.n_layers)]
    ends = counts.embedding + counts.head + model.d_model * (1 + model.embed_norm)
    assert sum(block.total for block in blocks) + ends == counts.total
    by_layer = [block_flops_per_token(model, length, layer).total for layer in range(model.n_layers)]
    assert math.isclose(sum(by_layer) + flops.head, flops.total, rel_tol=1e-12)
    assert all((block.dense > 0) == (layer < model.n_dense_layers) for layer, block in enumerate(blocks))


@given(models(), st.integers(1, 64))
@settings(derandomize=True, deadline=None)
def test_attention_scores_count_the_keys_of_every_layer_by_its_window(model, length):
    """Oracle: the causal, windowed mask written out, position by position."""
    distance = np.arange(length)[:, None] - np.arange(length)[None, :]
    near = [(distance >= 0) & ((window == FULL_ATTENTION) | (distance < window)) for window in model.windows]
    width = model.attention.n_heads * model.attention.head_dim
    oracle = sum(12 * width * mask.sum() / length for mask in near)
    assert math.isclose(flops_per_token(model, length).attention_scores, oracle, rel_tol=1e-12)


def test_tied_head_costs_flops_but_no_weights():
    untied, tied = ModelConfig(), ModelConfig(tie_embeddings=True)
    assert parameter_counts(untied).total - parameter_counts(tied).total == untied.d_model * untied.vocab_size
    assert flops_per_token(untied, 64) == flops_per_token(tied, 64)


# --- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 7, 64])
@pytest.mark.parametrize("window", [FULL_ATTENTION, 1, 2, 5, 63, 64, 1000])
def test_attended_keys_are_those_of_the_attention_mask(length, window):
    mask = attention_mask(np.zeros((1, length), np.int32), np.int32(window))
    assert math.isclose(attended_keys(length, window), int(mask.sum()) / length, rel_tol=1e-12)


def test_attended_keys_without_a_window_are_half_the_sequence():
    assert attended_keys(8192) == 8193 / 2
    assert attended_keys(8192, 8192) == attended_keys(8192, 10**9) == attended_keys(8192)


@pytest.mark.parametrize(
    ("full_first", "full_last", "expected"),
    [
        (False, False, (4, 8, -1, 4, 8, -1, 4)),
        (True, False, (-1, 4, 8, -1, 4, 8, -1)),  # the pattern begins after a first layer with full attention
        (False, True, (4, 8, -1, 4, 8, -1, -1)),
        (True, True, (-1, 4, 8, -1, 4, 8, -1)),
    ],
)
def test_windows_repeat_the_pattern_as_olmo_core_does(full_first, full_last, expected):
    attention = AttentionConfig(window_pattern=(4, 8, -1), full_first=full_first, full_last=full_last)
    assert ModelConfig(n_layers=7, attention=attention).windows == expected


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: flops_per_token(ModelConfig(), 0),
        lambda: attended_keys(-3),
        lambda: mfu(FlopsPerToken(), 1.0, peak_teraflops=0.0),
        lambda: mfu(FlopsPerToken(), 1.0, peak_teraflops=989.0, devices=0),
    ],
)
def test_meaningless_sizes_are_refused(call):
    with pytest.raises(UserError, match="greater than 0"):
        call()
