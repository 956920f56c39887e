"""Decoding with a cache gives what full forward passes give, token for token, on every mesh; text and draws behave."""

import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import generate as command
from moejax.checkpoint.huggingface import HFFolder
from moejax.checkpoint.saved_model import run_config, write_run
from moejax.config import Config, Dtype, PrecisionConfig
from moejax.data.tokenizers import ByteTokenizer
from moejax.errors import UserError
from moejax.generation import TextStream, generate
from moejax.mesh import make_mesh, parse_mesh
from moejax.models.decoding import NEVER, restrict
from moejax.models.transformer import Transformer, init_params
from moejax.parallel.inference import InferenceProgram, Sampling
from tests.small import small_config

ROOT = Path(__file__).parents[1]
GIVEN = Path(os.environ.get("MOEJAX_HF_GOLDEN_DIR", ROOT.parent / "shared" / "golden_hf"))
FIXTURE = ROOT / "tests" / "fixtures" / "golden_hf" / "qwen2_moe"  # window of 5 tokens, one dense layer
FOLDERS = [FIXTURE, *[GIVEN / name for name in ("olmoe",) if (GIVEN / name).is_dir()]]
COUNT = 12


@pytest.fixture(params=FOLDERS, ids=lambda path: path.name, scope="module")
def imported(request: pytest.FixtureRequest):
    folder = HFFolder(request.param)
    params = folder.import_params()
    vocab = folder.model.vocab_size
    prompts = [np.random.default_rng(n).integers(0, vocab, n).astype(np.int32) for n in (3, 11, 7)]
    full = jax.jit(Transformer(folder.model, params).__call__)
    expected = []
    for prompt in prompts:
        ids = np.zeros((1, 32), np.int32)  # tokens after the one asked for do not count: attention is causal
        ids[0, : len(prompt)] = prompt
        for place in range(len(prompt), len(prompt) + COUNT):
            ids[0, place] = int(jnp.argmax(full(ids)[0, place - 1]))
        expected.append(ids[0, len(prompt) : len(prompt) + COUNT])
    return folder.model, params, prompts, np.stack(expected)


@functools.cache
def program(model, mesh: str) -> InferenceProgram:
    return InferenceProgram(
        Config(model=model, precision=PrecisionConfig(Dtype.float32, Dtype.float32)), make_mesh(parse_mesh(mesh))
    )


@pytest.mark.parametrize("mesh", ["dp=1", "dp=2,ep=2,pp=2"])
def test_greedy_equals_full_forward_passes(imported, mesh: str):
    model, params, prompts, expected = imported
    runner = program(model, mesh)
    rows = list(generate(runner, runner.place(params), prompts, COUNT, Sampling()))
    np.testing.assert_array_equal(np.stack(rows, axis=1), expected)


def test_draws_depend_on_the_seed_alone(imported):
    model, params, prompts, _ = imported

    def drawn(mesh: str, seed: int, some: slice = slice(None)) -> np.ndarray:
        runner = program(model, mesh)
        sampling = Sampling(temperature=1.0, top_k=30, top_p=0.95, seed=seed)
        return np.stack(list(generate(runner, runner.place(params), prompts[some], 6, sampling)), axis=1)

    first = drawn("dp=1", 1)
    np.testing.assert_array_equal(first, drawn("ep=2", 1))
    np.testing.assert_array_equal(first[:1], drawn("dp=1", 1, slice(0, 1)))
    assert (first != drawn("dp=1", 2)).any()


@pytest.mark.parametrize(
    "top_k, top_p, kept", [(0, 1.0, 4), (2, 1.0, 2), (0, 0.5, 1), (0, 0.6, 2), (3, 0.99, 3), (9, 0.01, 1)]
)
def test_restriction_keeps_the_likeliest(top_k: int, top_p: float, kept: int):
    logits = jnp.log(jnp.array([[0.1, 0.5, 0.15, 0.25]]))
    left = np.asarray(restrict(logits, top_k, top_p))[0]
    assert set(np.flatnonzero(left > NEVER)) == set(np.argsort(-np.asarray(logits)[0])[:kept])


def test_text_stops_where_it_should():
    def shown(text: str, stop=(), end=False):
        stream = TextStream(ByteTokenizer(), stop)
        ids = [*text.encode(), *([256] if end else [])]
        parts = [stream.push(i) for i in ids]
        return parts, "".join(parts) + ("" if stream.done else stream.finish())

    parts, text = shown("abé!")
    assert text == "abé!" and not any("\ufffd" in part for part in parts)
    assert shown("one. two", stop=[". "])[1] == "one"
    assert shown("one. two", stop=[".x"])[1] == "one. two"
    assert shown("ab", end=True)[1] == "ab"
    assert "." not in "".join(shown("one.", stop=[". "])[0])  # it might be the beginning of the stop


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "small"
    path.mkdir()
    model = small_config("model.n_layers=2").model
    config = run_config(model, path, dtype="float32", sequence_length=64, tokenizer="bytes")
    state = {"step": jnp.int32(0), "master": init_params(model, jax.random.key(0))}
    write_run(path, config, state, {"format": "made"}).close()
    return path


def test_command(run: Path, capsys: pytest.CaptureFixture):
    assert command.main([str(run), "--prompt", "ab", "--tokens", "5", "--temperature", "1", "--seed", "4"]) == 0
    once = capsys.readouterr().out
    assert once.startswith("ab") and len(once) > 3
    assert command.main([str(run), "--prompt-ids", "97,98", "--prompt-ids", "5", "--tokens", "4"]) == 0
    lines = capsys.readouterr().out.split()
    assert [len(line.split(",")) for line in lines] == [4, 4]
    for arguments, message in (
        (["--prompt", ""], "Prompt 1 is empty"),
        ([], "nothing to go on from"),
        (["--prompt-ids", "1,x"], "must be numbers"),
        (["--prompt-ids", "999"], "token id 999"),
        (["--prompt", "a", "--top-p", "0"], "--top-p"),
        (["--prompt", "a", "--step", "3"], "no checkpoint of step 3"),
    ):
        with pytest.raises(UserError, match=message):
            command.main([str(run), *arguments])


def test_training_goes_on_from_an_imported_model(run: Path, tmp_path: Path):
    """Weights without moments: the optimizer starts at zero, at step 0, with the weights that were imported."""
    import dataclasses
    import shutil

    from moejax.checkpoint.saved_model import SavedModel
    from moejax.trainer import Trainer

    shutil.copytree(run, tmp_path / "small")
    (tmp_path / "text.txt").write_text("Once upon a time there was a text to train on. " * 200)
    saved = SavedModel(tmp_path / "small")
    config = dataclasses.replace(
        saved.config,
        run=dataclasses.replace(saved.config.run, dir=str(tmp_path)),
        data=dataclasses.replace(
            saved.config.data, paths=(str(tmp_path / "text.txt"),), cache_dir=str(tmp_path / "cache")
        ),
        train=dataclasses.replace(saved.config.train, batch_tokens=256, eval_batches=0, steps=10),
    )
    with Trainer(config) as trainer:
        assert trainer.resumed_from == 0
        portable = trainer.program.portable(trainer.state)
        jax.tree.map(np.testing.assert_array_equal, portable.master, saved.params())
        assert not any(np.any(moment) for moment in jax.tree.leaves(portable.first_moment))


# --- evaluation ------------------------------------------------------------------------------------------------------


def write_task(folder: Path) -> Path:
    import gzip

    folder.mkdir(parents=True)
    lines = []
    for question, label in enumerate((0, 1, 1)):
        for choice, text in enumerate((" yes", " no, not at all")):
            request = {"context": f"Question {question}", "continuation": text}
            lines.append(
                json.dumps(
                    {
                        "request_type": "loglikelihood",
                        "request": request,
                        "idx": choice,
                        "doc_id": question,
                        "label": label,
                    }
                )
            )
    with gzip.open(folder / "requests.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    (folder / "config.json").write_text(json.dumps({"task_config": {"primary_metric": "acc_per_char"}}))
    return folder


def test_evaluation_is_the_sum_of_log_probabilities(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    from moejax import evaluate

    write_task(tmp_path / "tasks" / "yes_no")
    text = "Some text, é, that is a little longer than a row of the model: " * 3
    (tmp_path / "text.txt").write_text(text)
    common = ["--text", str(tmp_path / "text.txt"), "--tasks", "yes_no", "--tasks-dir", str(tmp_path / "tasks")]
    results = {}
    for mesh in ("dp=1", "dp=2,ep=2"):
        out = tmp_path / f"{mesh}.json"
        assert evaluate.main([str(run), *common, "--json", str(out), "--mesh", mesh]) == 0
        results[mesh] = json.loads(out.read_text())["results"]
    assert "yes_no" in capsys.readouterr().out
    from moejax.checkpoint.saved_model import SavedModel

    saved = SavedModel(run)
    model = Transformer(saved.config.model, saved.params())

    full = jax.jit(model.__call__)

    def nats(ids: list[int], count: int) -> float:
        padded = np.zeros((1, saved.config.data.sequence_length + 1), np.int32)
        padded[0, : len(ids)] = ids
        logits = np.asarray(jax.nn.log_softmax(full(padded)[0]))
        return sum(float(logits[place - 1, ids[place]]) for place in range(len(ids) - count, len(ids)))

    ids, length = list(text.encode()), saved.config.data.sequence_length
    rows = [ids[start : start + length + 1] for start in range(0, len(ids) - 1, length)]
    total = -sum(nats(row, len(row) - 1) for row in rows)
    scores = [
        [nats(list(f"Question {q}{c}".encode()), len(c)) / len(c) for c in (" yes", " no, not at all")]
        for q in range(3)
    ]
    accuracy = np.mean([int(np.argmax(score)) == label for score, label in zip(scores, (0, 1, 1), strict=True)])
    for of_text, of_task in results.values():
        np.testing.assert_allclose(of_text["nats_per_token"] * of_text["tokens"], total, rtol=1e-5)
        np.testing.assert_allclose(of_text["bits_per_byte"], total / np.log(2) / len(ids), rtol=1e-5)
        assert of_text["bytes"] == len(ids) and of_task["questions"] == 3
        np.testing.assert_allclose(of_task["accuracy"], accuracy)
        np.testing.assert_allclose(of_task["error"], np.sqrt(accuracy * (1 - accuracy) / 2))
