"""The commands that carry models in and out, and use them: bad input is one sentence and exit code 2, and nothing of
what was to be written is there."""

import json
import os
import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
import pytest

from moejax import cli, convert, evaluate, generate
from moejax.checkpoint.arrays import named_leaves
from moejax.checkpoint.huggingface import HFFolder
from moejax.checkpoint.saved_model import SavedModel
from tests.checkpoint.foreign import hf_settings, hf_tensors, write_distcp, write_hf

Main = Callable[[Sequence[str] | None], int]


def write_tokenizer(path: Path, size: int) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"t{n}": n for n in range(size - 1)} | {"<|endoftext|>": size - 1}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="t0")).save(str(path))
    return path


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder in two shards."""
    settings = hf_settings("olmoe")
    return write_hf(tmp_path_factory.mktemp("source") / "hf", settings, hf_tensors(settings), shards=2)


@pytest.fixture(scope="module")
def run(source: Path) -> Path:
    """The run folder it is imported into."""
    jax.devices()  # those of the session, before the command asks for one
    assert convert.main(["hf", str(source), str(source.parent / "run")]) == 0
    return source.parent / "run"


@pytest.fixture
def refusal(tmp_path: Path, capfd: pytest.CaptureFixture) -> Callable[..., str]:
    """Runs a command that must refuse; what it says. `tmp_path` is afterwards as it was."""

    def refused(main: Main, *arguments: str | Path) -> str:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        capfd.readouterr()
        with pytest.raises(SystemExit) as left:
            cli.run(main, list(map(str, arguments)))
        said = capfd.readouterr().err
        assert left.value.code == 2
        lines = [line for line in said.splitlines() if line]
        assert len(lines) == 1 and lines[0].startswith("error: ") and lines[0].endswith("."), said
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        return lines[0]

    return refused


def copy(source: Path, folder: Path, **changes) -> Path:
    """The folder again, fields of its config.json changed."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "llama"}, "the model type 'llama' cannot be imported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2."),
        ({"intermediate_size": 16}, "has shape [8, 16], and its config asks for [16, 16]"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_architecture_or_shape(tmp_path, source, refusal, changes, says):
    folder = copy(source, tmp_path / "hf", **changes)
    assert says.lower() in refusal(convert.main, "hf", folder, tmp_path / "new").lower()
    assert not (tmp_path / "new").exists()


def test_missing_and_damaged_shards(tmp_path, source, refusal):
    folder = copy(source, tmp_path / "hf")
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert f"{shard} is cut short" in refusal(convert.main, "hf", folder, tmp_path / "new")
    shard.unlink()
    assert f"lacks {shard.name}" in refusal(convert.main, "hf", folder, tmp_path / "new")
    distributed = write_distcp(tmp_path / "step1" / "model_and_optim", {"module.a.main": np.ones(3, np.float32)})
    (tmp_path / "step1" / "config.json").write_text("{}")
    (distributed / "__0_0.distcp").unlink()
    assert "lacks __0_0.distcp" in refusal(convert.main, "olmo-core", tmp_path / "step1", tmp_path / "new")


def test_a_tokenizer_of_another_vocabulary(tmp_path, source, run, refusal):
    folder = copy(source, tmp_path / "hf")
    write_tokenizer(folder / "tokenizer.json", 61)
    assert "the tokenizer of another model: it has ids up to 60, and the model has 48 rows" in refusal(
        convert.main, "hf", folder, tmp_path / "new"
    )
    (tmp_path / "text.txt").write_text("t1 t2 t3")
    for main, what in ((generate.main, ["--prompt", "t1"]), (evaluate.main, ["--text", tmp_path / "text.txt"])):
        said = refusal(main, run, *what, "--tokenizer", folder / "tokenizer.json")
        assert "has ids up to 60, and the model a vocabulary of 48: it belongs to another model" in said


def test_no_room_for_what_is_written(tmp_path, source, run, refusal):
    """No file may grow beyond 4 KiB, as on a disk that has no more: arrays of a run folder, a shard of an export."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        into_run = refusal(convert.main, "hf", source, tmp_path / "new")
        out = refusal(convert.main, "to-hf", run, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "could not be saved" in into_run and "file too large" in into_run
    assert f"{tmp_path / 'out'} cannot be written (file too large); nothing is left of it" in out
    assert not list(tmp_path.iterdir())


def test_runs_that_cannot_be_used(tmp_path, run, refusal):
    assert "is no run folder" in refusal(generate.main, tmp_path, "--prompt-ids", "1")
    assert "is no run folder" in refusal(convert.main, "to-hf", tmp_path, tmp_path / "out")
    assert "ep=3 does not divide the 4 experts" in refusal(generate.main, run, "--prompt-ids", "1", "--mesh", "ep=3")
    assert "The model has ids 0 to 47" in refusal(generate.main, run, "--prompt-ids", "48").replace("the", "The")
    assert "no checkpoint of step 5" in refusal(evaluate.main, run, "--text", run / "config.yaml", "--step", "5")
    assert "There is no task nothing" in refusal(evaluate.main, run, "--tasks", "nothing", "--tasks-dir", tmp_path)
    said = refusal(convert.main, "to-hf", run, tmp_path / "out", "--architecture", "mixtral")
    assert "mixtral cannot express" in said


def test_a_damaged_checkpoint_is_named(tmp_path, run, refusal):
    shutil.copytree(run, tmp_path / "run")
    victim = max((tmp_path / "run" / "checkpoints").rglob("d/*"), key=os.path.getsize)
    content = bytearray(victim.read_bytes())
    content[0] ^= 1
    victim.write_bytes(content)
    for main, arguments in (
        (generate.main, [tmp_path / "run", "--prompt-ids", "1"]),
        (convert.main, ["to-hf", tmp_path / "run", tmp_path / "out"]),
    ):
        said = refusal(main, *arguments)
        assert "The checkpoint of step 0 cannot be used" in said and f"{victim.name} is not as it was written" in said


def test_a_folder_explains_itself(tmp_path, source, run, refusal, capfd):
    assert convert.main(["inspect", str(run)]) == 0
    out = capfd.readouterr().out
    assert f"Run folder {run}, step 0 of 0" in out and "Imported from hf olmoe." in out
    assert "model.moe.num_experts: 32 -> 4" in out and "files." in out
    leaves = named_leaves(SavedModel(run).params())
    for name, leaf in leaves.items():
        assert any(line.split()[:2] == [f"master/{name}", "float32"] for line in out.splitlines()), name
        assert str(list(leaf.shape)) in out
    assert convert.main(["inspect", str(source)]) == 0
    out = capfd.readouterr().out
    assert "Hugging Face folder" in out and "olmoe" in out and "model.layers.1.mlp.experts.3.down_proj.weight" in out
    assert "is neither a run folder" in refusal(convert.main, "inspect", tmp_path)


def test_over_many_devices_the_same_run_and_the_same_export(tmp_path, source, run):
    """Every tensor goes into the shards that hold a part of it; the bits are those of one device."""
    assert convert.main(["hf", str(source), str(tmp_path / "run"), "--mesh", "dp=4,pp=2"]) == 0
    ours, theirs = (named_leaves(SavedModel(folder).params()) for folder in (tmp_path / "run", run))
    for name, leaf in theirs.items():
        assert np.asarray(ours[name]).tobytes() == np.asarray(leaf).tobytes(), name
    assert convert.main(["to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--mesh", "ep=4"]) == 0
    first, second = HFFolder(source), HFFolder(tmp_path / "out")
    assert first.tensors.keys() == second.tensors.keys()
    assert all(first.read(name).tobytes() == second.read(name).tobytes() for name in first.tensors)
