"""The study of values: inputs are known by their content, and results on different inputs are not compared.

small families --bench values --json--> rows --> --compare with itself, with another seed, with other files
"""

import argparse
import json

import numpy as np
import pytest

from moejax import bench
from moejax.benches import values
from moejax.errors import UserError

SIZES = ["--rows", "64", "--experts", "4", "--width", "8", "--hidden", "16", "--turns", "1"]
FEW = ["--families", "normal", "zeros", "one-hot"]


def operands(family: str, seed: int = 0, dtype: str = "float32") -> values.Operands:
    arguments = argparse.Namespace(rows=64, experts=4, width=8, hidden=16, seed=seed, dtype=dtype)
    return values.make_operands(arguments, family)


@pytest.mark.parametrize("family", values.FAMILIES)
def test_a_family_is_what_its_name_says_and_shapes_are_the_same(family):
    made, normal = operands(family), operands("normal")
    assert [(a.shape, a.dtype) for a in made] == [(a.shape, a.dtype) for a in normal]
    assert made.group_sizes_E.sum() == 64 and made.group_sizes_E.min() >= 0
    rows = made.rows_RD
    assert {
        "normal": rows.std() > 0.5,
        "zeros": not rows.any(),
        "ones": (rows == 1).all(),
        "sparse": 0.75 < (rows == 0).mean() < 1,
        "integers": np.array_equal(rows, np.rint(rows)) and np.abs(rows).max() <= 8,
        "denormal": 0 < np.abs(rows).max() < np.finfo(np.float32).tiny,
        "zipf": made.group_sizes_E.max() > 24,
        "one-hot": made.group_sizes_E.max() == 64,
    }[family]


def test_fingerprints_tell_inputs_apart_and_only_inputs():
    marks = [values.fingerprint(operands(f, seed)) for f in values.FAMILIES for seed in (0, 1)]
    again = [values.fingerprint(operands(f, seed)) for f in values.FAMILIES for seed in (0, 1)]
    assert marks == again
    drawn = {m for f, m in zip(np.repeat(values.FAMILIES, 2), marks, strict=True) if f not in ("zeros", "ones")}
    assert len(drawn) == 2 * (len(values.FAMILIES) - 2)
    assert values.fingerprint(operands("ones")) != values.fingerprint(operands("ones", dtype="bfloat16"))


def test_a_result_is_compared_with_the_same_inputs_alone(tmp_path):
    file, later = tmp_path / "before.json", tmp_path / "after.json"
    assert bench.main(["values", *SIZES, *FEW, "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["family"] for row in rows] == FEW[1:] and all(len(row["fingerprint"]) == 16 for row in rows)
    assert bench.main(["values", *SIZES, *FEW, "--compare", str(file), "--json", str(later)]) == 0
    compared = json.loads(later.read_text())["rows"]
    assert [row["earlier_seconds"] for row in compared] == [row["seconds"] for row in rows]
    with pytest.raises(UserError, match="other inputs.*fingerprint.*--seed"):
        bench.main(["values", *SIZES, *FEW, "--seed", "1", "--compare", str(file)])
    with pytest.raises(UserError, match="has no 'ones'"):
        bench.main(["values", *SIZES, "--families", "ones", "--compare", str(file)])
    file.write_text("[]")
    with pytest.raises(UserError, match="is no result"):
        bench.main(["values", *SIZES, "--compare", str(file)])
    with pytest.raises(UserError, match="nowhere"):
        bench.main(["values", *SIZES, "--compare", str(tmp_path / "nowhere.json")])
