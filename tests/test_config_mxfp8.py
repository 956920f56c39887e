"""Combinations of precision.mxfp8 that mean nothing are refused in one sentence, with the way out."""

import pytest

from moejax import config_io
from moejax.errors import UserError

ON = "precision.mxfp8.experts=mxfp8"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([ON, "model.d_model=48"], r"model\.d_model=48 is not a multiple of 32"),
        ([ON, "model.moe.hidden=40"], r"model\.moe\.hidden=40 is not a multiple"),
        ([ON, "precision.mxfp8.exclude_layers=[1]"], r"set precision\.mxfp8\.keep_bf16=true"),
        (
            [ON, "precision.mxfp8.keep_bf16=true", "precision.mxfp8.exclude_layers=[9]"],
            r"n_layers=4 layers, 0 the first",
        ),
        ([ON, "model.n_dense_layers=4"], "every layer is dense"),
        (["precision.mxfp8.shared_experts=mxfp8", "model.moe.shared_experts=2"], r"shared_experts=2 are mixed"),
        (["precision.mxfp8.attention=mxfp8", "model.attention.head_dim=4"], r"n_heads \* head_dim=16"),
        (["precision.mxfp8.hardware=required"], r"set precision\.mxfp8\.experts=mxfp8"),
        ([ON, "parallel.strategy=fsdp"], "set strategy=resident"),
        (["precision.mxfp8.experts=nvfp4"], "off, mxfp8"),
    ],
)
def test_refused(overrides, words):
    with pytest.raises(UserError, match=words) as refusal:
        config_io.load(None, overrides)
    assert "\n" not in str(refusal.value)


def test_off_by_default_and_asked_for_by_part():
    assert not config_io.load(None, []).precision.mxfp8.on
    for part in ("experts", "shared_experts", "attention"):
        assert config_io.load(None, [f"precision.mxfp8.{part}=mxfp8"]).precision.mxfp8.on
