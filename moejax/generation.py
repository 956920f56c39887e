"""Text from a model: prompts in, tokens out one by one for all rows at once, text as soon as it is certain.

    prompts --tokenizer--> ids --InferenceProgram.next_tokens, over and over--> ids --TextStream--> pieces of text

`generate` gives token ids; `TextStream` turns those of one row into text, up to a stop string or the end of the
document.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from moejax.checkpoint.saved_model import SavedModel
from moejax.config import Config, Dtype, PrecisionConfig
from moejax.data.tokenizers import Tokenizer, load_tokenizer
from moejax.errors import UserError
from moejax.models.transformer import Params
from moejax.parallel.inference import InferenceProgram, Sampling, pad_rows

BROKEN = "\ufffd"  # what a tokenizer gives for a character whose last bytes are still to come


class LoadedModel:
    """A model of a run folder on a mesh, ready to run. config, program, params, tokenizer (None: it has none that
    fits).

    dtype: of weights and activations; None takes the run's own. Raises UserError as `SavedModel` does.
    """

    def __init__(self, run: str | Path, mesh: Mesh, *, step: int | None = None, dtype: str | None = None):
        saved = SavedModel(run, step)
        self.step = saved.step
        config = saved.config
        if dtype is not None:
            config = dataclasses.replace(config, precision=PrecisionConfig(Dtype(dtype), Dtype(dtype)))
        self.config: Config = config
        self.program = InferenceProgram(config, mesh)
        self.program.take_score_bias(saved.score_bias())
        self.params: Params = self.program.place(saved.params(self.program.target()))

    def tokenizer(self) -> Tokenizer:
        """The run's own. Raises UserError: the file is gone, or it has more tokens than the model has rows."""
        name = self.config.data.tokenizer
        tokenizer = load_tokenizer(name)
        if tokenizer.vocab_size > self.config.model.vocab_size:
            raise UserError(
                f"The tokenizer data.tokenizer={name} has ids up to {tokenizer.vocab_size - 1}, and the model a "
                f"vocabulary of "
                f"{self.config.model.vocab_size}: it belongs to another model. Give token ids, or --tokenizer with "
                f"its own."
            )
        return tokenizer


def generate(
    program: InferenceProgram, params: Params, prompts: Sequence[np.ndarray], count: int, sampling: Sampling
) -> Iterator[np.ndarray]:
    """Yields int32[prompts], the next token of every prompt, `count` times.

    prompts: ids, at least one each. The same prompts, seed and options give the same tokens on every mesh, as far as
    rounding lets two equally likely tokens be told apart. Raises UserError for an empty prompt or an id out of range.
    """
    vocabulary = program.config.model.vocab_size
    for number, prompt in enumerate(prompts, 1):
        if len(prompt) == 0:
            raise UserError(f"Prompt {number} is empty; give at least one token.")
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            raise UserError(
                f"Prompt {number} has the token id {prompt.max()}; the model has ids 0 to {vocabulary - 1}."
            )
    tokens = pad_rows(list(prompts), program.row_multiple, 0)
    lengths = np.ones(len(tokens), np.int32)
    lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
    cache = program.empty_cache(len(tokens), -(-(int(lengths.max()) + count) // 64) * 64)
    first = np.zeros_like(lengths)
    for step in range(count):
        new, cache = program.next_tokens(params, tokens, first, lengths, cache, step, sampling)
        yield np.asarray(new)[: len(prompts)]
        first, lengths = first + lengths, np.ones_like(lengths)
        tokens = new[:, None]


class TextStream:
    """The text of one row as its tokens come: `push` returns what is certain by now, `finish` the rest.

    It ends at a stop string, which is left out, or at the end-of-document token; `done` says so.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self.tokenizer, self.stop = tokenizer, [text for text in stop if text]
        self.ids: list[int] = []
        self.text, self.shown, self.done = "", 0, False

    def push(self, token: int) -> str:
        if self.done:
            return ""
        if token == self.tokenizer.end_of_document_id:
            return self.finish()
        self.ids.append(token)
        self.text = self.tokenizer.decode(self.ids)
        ends = [place for stop in self.stop if (place := self.text.find(stop)) >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            return self.finish()
        return self._show(len(self.text) - self._uncertain())

    def _uncertain(self) -> int:
        """Characters at the end that the next token may change, or that may be the beginning of a stop string."""
        broken = len(self.text) - len(self.text.rstrip(BROKEN))
        begun = [n for stop in self.stop for n in range(1, len(stop)) if self.text.endswith(stop[:n])]
        return max([broken, *begun])

    def _show(self, end: int) -> str:
        new = self.text[self.shown : end]
        self.shown = max(self.shown, end)
        return new

    def finish(self) -> str:
        self.done = True
        return self._show(len(self.text))
