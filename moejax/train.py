"""Train a model: `python -m moejax.train --config configs/tiny.yaml --mesh dp=2,ep=8,pp=4 train.steps=100`.

The same command resumes by itself. On a machine without GPUs the devices of the mesh are simulated.
"""

from collections.abc import Sequence

from moejax import cli
from moejax.mesh import parse_mesh, prepare_devices, start_processes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = cli.config_parser("train", "Train a mixture-of-experts language model; the same command resumes.")
    config = cli.read_config(parser.parse_intermixed_args(arguments))
    shape = parse_mesh(config.parallel.mesh)
    prepare_devices(shape.devices)
    start_processes()

    from moejax.trainer import Trainer  # here, since the devices are fixed by what it imports

    with Trainer(config) as trainer:
        interruption = trainer.run()
    return interruption.exit_code if interruption else 0


if __name__ == "__main__":
    cli.run(main)
