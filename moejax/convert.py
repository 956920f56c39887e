"""Bring models in and out: `python -m moejax.convert hf|olmo-core SRC DST`, `to-hf RUN DST`, `inspect PATH`.

    hf SRC DST          a Hugging Face folder to a run folder: olmoe, flex_olmo, qwen3_moe, qwen2_moe, mixtral, olmo3moe
    olmo-core SRC DST   an Olmo-core 3 checkpoint, its moments too; torch is not needed
    to-hf RUN DST       a run folder to a Hugging Face folder
    inspect PATH        what any of them holds

DST is written whole, read back and compared, or not at all. `--verify ids.npz` compares logits with given ones too.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moejax import cli
from moejax.config import ModelConfig
from moejax.errors import UserError
from moejax.mesh import make_mesh, parse_mesh, prepare_devices


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog="python -m moejax.convert", description=(__doc__ or "").split("\n\n", 1)[0])
    kinds = parser.add_subparsers(dest="kind", required=True, parser_class=cli.Parser)
    verify: dict[str, Any] = dict(
        type=Path, metavar="ids.npz", help="compare logits: arrays `ids` [B, S] and `logits` [B, S, V]"
    )
    mesh: dict[str, Any] = dict(default="dp=1", help="devices to spread the weights over, e.g. dp=8 (default: one)")
    for kind, what in (("hf", "a Hugging Face folder"), ("olmo-core", "an Olmo-core 3 checkpoint")):
        one = kinds.add_parser(kind, help=f"import {what}")
        one.add_argument("src", type=Path)
        one.add_argument("dst", type=Path, help="the run folder to make")
        one.add_argument("--verify", **verify)
        one.add_argument("--mesh", **mesh)
    out = kinds.add_parser("to-hf", help="export a run folder to Hugging Face")
    out.add_argument("run", type=Path)
    out.add_argument("dst", type=Path, help="the folder to make")
    out.add_argument(
        "--architecture", metavar="TYPE", help="model_type to write; default: the one it came with, or that fits"
    )
    out.add_argument("--dtype", choices=("F32", "F16", "BF16"), help="default: as it came, or precision.params")
    out.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    out.add_argument("--shard-gb", type=float, default=5.0, help="largest file, in 1e9 bytes (default: 5)")
    out.add_argument("--verify", **verify)
    out.add_argument("--mesh", **mesh)
    look = kinds.add_parser(
        "inspect", help="print step, config, sizes and shapes of a run folder or a foreign checkpoint"
    )
    look.add_argument("path", type=Path)
    look.add_argument("--step", type=int, help="of a run folder; default: the newest")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    shape = parse_mesh(getattr(given, "mesh", "dp=1"))
    prepare_devices(shape.devices)

    from moejax.checkpoint import conversion, inspection  # here, since they fix the devices
    from moejax.models.transformer import Params, abstract_params
    from moejax.parallel import sharding

    def target(model: ModelConfig) -> Params:
        return sharding.spread(abstract_params(model), make_mesh(shape))

    if given.kind == "inspect":
        inspection.show(given.path, given.step)
        return 0
    if given.kind == "hf":
        report = conversion.import_hf(given.src, given.dst, given.verify, target)
    elif given.kind == "olmo-core":
        report = conversion.import_olmo_core(given.src, given.dst, given.verify, target)
    else:
        if given.shard_gb <= 0:
            raise UserError(f"--shard-gb {given.shard_gb} must be greater than 0.")
        report = conversion.export_hf(
            given.run,
            given.dst,
            kind=given.architecture,
            dtype=given.dtype,
            step=given.step,
            shard_gb=given.shard_gb,
            verify=given.verify,
            target=target,
        )
    inspection.show_report(report)
    return 0


if __name__ == "__main__":
    cli.run(main)
