"""Continue text with a model: `python -m moejax.generate runs/tiny --prompt "import jax" --tokens 100`.

Greedy by default; `--temperature`, `--top-k` and `--top-p` draw instead, the same tokens for the same `--seed`. Text
appears as it comes; several prompts run as one batch and are printed one after the other.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moejax import cli
from moejax.errors import UserError
from moejax.mesh import make_mesh, parse_mesh, prepare_devices


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(prog="python -m moejax.generate", description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("run", help="run folder")
    parser.add_argument("--prompt", action="append", default=[], help="text to go on from; again for a batch")
    parser.add_argument("--prompt-file", type=Path, help="file with one prompt a line")
    parser.add_argument("--prompt-ids", action="append", default=[], metavar="1,2,3", help="a prompt as token ids")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to add at most (default: 64)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token each time (default)")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k likeliest tokens only; 0: all (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the likeliest that hold this probability")
    parser.add_argument("--stop", action="append", default=[], help="text to end before; again for more")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument(
        "--mesh",
        default="dp=1",
        help="any mesh, e.g. dp=2,ep=4: experts over ep, rows of the batch over all devices, pp as dp (default: one)",
    )
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as the run")
    parser.add_argument("--tokenizer", help='"bytes" or the path of a tokenizer.json; default: the run\'s own')
    return parser


def _check(given: argparse.Namespace) -> None:
    for name, good, must in (
        ("tokens", given.tokens > 0, "be greater than 0"),
        ("temperature", 0 <= given.temperature < float("inf"), "be a number not below 0"),
        ("top_k", given.top_k >= 0, "not be negative"),
        ("top_p", 0 < given.top_p <= 1, "be greater than 0 and at most 1"),
        ("seed", 0 <= given.seed < 2**32, "be between 0 and 2^32 - 1"),
    ):
        if not good:
            raise UserError(f"--{name.replace('_', '-')} {getattr(given, name)} must {must}.")


def _read_prompts(given: argparse.Namespace) -> list[str]:
    prompts = list(given.prompt)
    if given.prompt_file is not None:
        try:
            prompts += given.prompt_file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--prompt-file {given.prompt_file} cannot be read ({error}).") from error
    if not prompts and not given.prompt_ids:
        raise UserError("There is nothing to go on from: give --prompt TEXT, --prompt-file FILE or --prompt-ids 1,2,3.")
    return prompts


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    _check(given)
    prompts = _read_prompts(given)
    shape = parse_mesh(given.mesh)
    prepare_devices(shape.devices)

    from moejax.generation import LoadedModel, TextStream, generate  # here, since they fix the devices
    from moejax.parallel.inference import Sampling

    model = LoadedModel(given.run, make_mesh(shape), step=given.step, dtype=given.dtype)
    if given.tokenizer:
        model.config = dataclasses.replace(
            model.config, data=dataclasses.replace(model.config.data, tokenizer=given.tokenizer)
        )
    sampling = Sampling(given.temperature, given.top_k, given.top_p, given.seed)
    try:
        ids = [np.array([int(part) for part in text.split(",")], np.int32) for text in given.prompt_ids]
    except (ValueError, OverflowError):
        raise UserError(
            f"--prompt-ids {' '.join(given.prompt_ids)} must be numbers with commas between, e.g. 1,2,3."
        ) from None
    if prompts or given.stop:
        tokenizer = model.tokenizer()
        ids = [tokenizer.encode(text) for text in prompts] + ids
    if given.prompt_ids and not prompts:  # ids in, ids out: it needs no tokenizer
        rows = np.stack(list(generate(model.program, model.params, ids, given.tokens, sampling)), axis=1)
        for row in rows:
            print(",".join(map(str, row)))
        return 0
    streams = [TextStream(tokenizer, given.stop) for _ in ids]
    alone = len(ids) == 1
    if alone:
        print(prompts[0], end="", flush=True)
    for new in generate(model.program, model.params, ids, given.tokens, sampling):
        for stream, token in zip(streams, new, strict=True):
            text = stream.push(int(token))
            if alone:
                print(text, end="", flush=True)
        if all(stream.done for stream in streams):
            break
    if alone:
        print("" if streams[0].done else streams[0].finish())
    else:
        shown = [*prompts, *(f"[{text}]" for text in given.prompt_ids)]
        for prompt, stream in zip(shown, streams, strict=True):
            print(f"{prompt}{stream.text}\n{'-' * 8}")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    cli.run(main)
