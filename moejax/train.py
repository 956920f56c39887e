"""Train a model: `python -m moejax.train --config configs/tiny.yaml --mesh dp=2,ep=8,pp=4 train.steps=100`.

The same command resumes by itself. On a machine without GPUs the devices of the mesh are simulated.
"""

from collections.abc import Sequence

from moejax import cli
from moejax.mesh import check_fit, parse_mesh, prepare_devices, start_processes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.config_parser("train", "Train a mixture-of-experts language model; the same command resumes.")
    config = cli.read_config(parser.parse_intermixed_args(arguments))
    shape = parse_mesh(config.parallel.mesh)
    check_fit(config, shape)  # before any device is simulated
    prepare_devices(shape.devices)
    start_processes()

    from moejax.trainer import Trainer  # here, since the devices are fixed by what it imports

    with Trainer(config) as trainer:
        signal = trainer.run()
    return 128 + signal if signal else 0  # as a shell reports a process that a signal ended: there is more to do


if __name__ == "__main__":
    cli.run(main)
