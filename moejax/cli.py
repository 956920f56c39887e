"""What the commands share: arguments, help that lists every field, one sentence and exit code 2 for bad input."""

import argparse
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import NoReturn

from moejax import config_io
from moejax.config import Config
from moejax.errors import UserError

DEFAULT_CONFIG = "configs/tiny.yaml"


class Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments in one sentence, as everything else does."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[:1].upper()}{message[1:]}; --help lists what there is.")


def config_parser(program: str, description: str) -> argparse.ArgumentParser:
    """A parser for `--config FILE --mesh M a.b=c ...` whose --help lists every field of the configuration."""
    parser = Parser(
        prog=f"python -m moejax.{program}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=fields_help(),
    )
    parser.add_argument(
        "--config", default=DEFAULT_CONFIG, metavar="FILE", help=f"YAML file (default: {DEFAULT_CONFIG})"
    )
    parser.add_argument("--mesh", metavar="M", help="devices by axis, e.g. dp=2,ep=8,pp=4: short for parallel.mesh=M")
    parser.add_argument("overrides", nargs="*", metavar="a.b=c", help="fields of the configuration, listed below")
    return parser


def whole_numbers(text: str) -> tuple[int, ...]:
    """An argument such as 8,32,128."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers above 0, such as 8,32,128")
    return numbers


def whole_number(text: str) -> int:
    """An argument such as 8."""
    numbers = whole_numbers(text)
    if len(numbers) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not one whole number above 0")
    return numbers[0]


def fields_help(width: int = 110) -> str:
    """Every field with its default and its sentence."""
    lines = ["configuration fields (default):"]
    for name, default, sentence in config_io.help_rows():
        lines.append(f"  {name}={default}")
        lines += textwrap.wrap(sentence, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def read_config(arguments: argparse.Namespace) -> Config:
    overrides = list(arguments.overrides)
    if arguments.mesh is not None:
        overrides.append(f"parallel.mesh='{arguments.mesh}'")
    return config_io.load(arguments.config, overrides)


def run(main: Callable[[Sequence[str] | None], int], arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and leave with its exit code: 2 and one sentence for a UserError, 130 for a Ctrl-C."""
    try:
        code = main(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("Ctrl-C: left; nothing was lost that had been saved.", file=sys.stderr)
        code = 128 + signal.SIGINT
    except BrokenPipeError:  # `| head`
        code = 0
    sys.exit(code)
