"""Configurations: what is written is read back, files in configs/ are whole, what cannot work is refused by name."""

import dataclasses
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax import config_io
from moejax.config import Config, Recompute, Writer, validate
from moejax.config_io import differences, flatten, from_dict, help_rows, load, to_dict, to_yaml
from moejax.errors import UserError

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
LEAVES = flatten(to_dict(Config()))
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def refusal(*overrides: str, path: Path | None = None) -> str:
    """The sentence that `load` answers with: one line, ended like a sentence."""
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    sentence = str(caught.value)
    assert "\n" not in sentence and sentence.endswith((".", "?"))
    return sentence


# --- round trip ------------------------------------------------------------------------------------------------------


def read_back(config: Config, folder: Path) -> Config:
    path = folder / "config.yaml"
    path.write_text(to_yaml(config))
    return load(path)


@each_file
def test_what_a_run_saves_is_read_back_equal(path, tmp_path):
    config = load(path)
    assert read_back(config, tmp_path) == config
    assert from_dict(to_dict(config)) == config
    assert from_dict(yaml.safe_load(to_yaml(config))) == config  # without OmegaConf too


NAMES = st.from_regex(r"[A-Za-z0-9_+-][A-Za-z0-9 _.:#,'\"+-]{0,8}", fullmatch=True)


@given(
    name=NAMES,
    paths=st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C"], exclude_characters="$"), min_size=1)),
    rate=st.floats(0, 1e3),
    betas=st.tuples(*[st.floats(0, 1, exclude_max=True)] * 2),
    scale=st.none() | st.floats(1e-6, 1e6),
    windows=st.lists(st.just(-1) | st.integers(1, 10**6)),
    recompute=st.sampled_from(Recompute),
    writers=st.lists(st.sampled_from(Writer), unique=True),
)
@settings(derandomize=True, deadline=None)
def test_any_values_are_read_back_equal(tmp_path_factory, name, paths, rate, betas, scale, windows, recompute, writers):
    plain = to_dict(Config())
    plain["run"] |= {"name": name, "writers": [writer.value for writer in writers]}
    plain["data"]["paths"] = paths
    plain["optimizer"] |= {"learning_rate": rate, "betas": list(betas)}
    plain["model"]["embed_scale"] = scale
    plain["model"]["attention"]["window_pattern"] = windows
    plain["parallel"]["recompute"] = recompute.value
    config = from_dict(plain)
    assert read_back(config, tmp_path_factory.mktemp("run")) == config
    assert (config.run.name, config.data.paths, config.optimizer.betas) == (name, tuple(paths), betas)


def test_configurations_are_hashable_and_frozen():
    assert hash(load()) == hash(load()) and load() == Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        load().train.steps = 3


# --- the files in configs/ -------------------------------------------------------------------------------------------


def test_every_published_configuration_is_there():
    eight_layers = {f"moe_8l_{e}e" for e in (8, 32, 48, 64, 128)}
    report = {
        "tiny_64e",
        "small_64e",
        "medium_64e",
        "medium_96e",
        "medium_128e",
        "large_128e",
        "ultra_128e",
        "ultra_256e",
    }
    assert {path.stem for path in FILES} == {"tiny", "olmoe_1b_7b"} | eight_layers | report


@each_file
def test_a_file_says_only_what_differs_from_the_defaults(path):
    said, default = flatten(yaml.safe_load(path.read_text())), LEAVES
    assert [field for field, value in said.items() if default[field] == value] == []
    assert path.read_text().startswith("# ")


@each_file
def test_a_file_names_its_run_after_itself(path):
    assert load(path).run.name == path.stem


def mesh_sizes(mesh: str) -> dict[str, int]:
    return {"dp": 1, "ep": 1, "pp": 1} | {
        axis: int(size) for axis, size in (part.split("=") for part in mesh.split(","))
    }


def assert_fits(config: Config, mesh: str) -> None:
    size = mesh_sizes(mesh)
    sequences = config.train.batch_tokens // config.data.sequence_length
    assert sequences % (config.parallel.pipeline.microbatches * size["dp"] * size["ep"]) == 0
    assert config.model.moe.num_experts % size["ep"] == 0
    assert config.model.n_layers >= size["pp"] and config.parallel.pipeline.microbatches >= size["pp"]


@each_file
def test_a_file_fits_its_own_mesh(path):
    config = load(path)
    assert_fits(config, config.parallel.mesh)


def test_tiny_fits_one_device_and_the_64_of_the_readme():
    assert_fits(load(CONFIGS / "tiny.yaml"), "dp=2,ep=8,pp=4")
    assert load(CONFIGS / "tiny.yaml").parallel.mesh == "dp=1"


# nodes of 8 GPUs, Mi tokens a step, sequences per rank and microbatch, base learning rate at 8 Mi, its published value
REPORT = {
    "tiny_64e": (2, 8, 8, 1.8e-4, "1.80e-04"),
    "small_64e": (16, 24, 3, 1.8e-4, "3.22e-04"),
    "medium_64e": (16, 16, 2, 1.8e-4, "2.60e-04"),
    "medium_96e": (16, 24, 2, 1.8e-4, "3.22e-04"),
    "medium_128e": (16, 24, 2, 1.8e-4, "3.22e-04"),
    "large_128e": (64, 32, 1, 1.2e-4, "2.50e-04"),
    "ultra_128e": (64, 64, 1, 1.2e-4, "3.61e-04"),
    "ultra_256e": (64, 64, 2, 1.2e-4, "3.61e-04"),
}


@pytest.mark.parametrize("name", REPORT)
def test_report_recipe(name):
    """What the scripts of the report share: partly written in the file, partly a default here that must stay."""
    nodes, mega_tokens, per_rank, base, rate = REPORT[name]
    config = load(CONFIGS / f"{name}.yaml")
    size = mesh_sizes(config.parallel.mesh)
    assert math.prod(size.values()) == 8 * nodes
    assert config.train.batch_tokens == mega_tokens * 2**20
    shards = size["dp"] * size["ep"]
    assert config.train.batch_tokens == 8192 * shards * per_rank * config.parallel.pipeline.microbatches
    assert f"{config.optimizer.learning_rate:.2e}" == rate
    assert math.isclose(config.optimizer.learning_rate, base * (mega_tokens / 8) ** 0.53, rel_tol=1e-4)
    assert config.optimizer.schedule.warmup_steps == int(30e9 // config.train.batch_tokens)
    assert config.train.steps == math.ceil(200e9 / config.train.batch_tokens)
    flat = flatten(to_dict(config))
    shared = {
        "model.norm_placement": "peri",
        "model.norm_eps": 1e-6,
        "model.embed_scale": None,
        "model.embed_norm": True,
        "model.tie_embeddings": False,
        "model.vocab_size": 100_352,
        "model.init_std": 0.01,
        "model.z_loss": 1e-4,
        "model.attention.head_dim": 128,
        "model.attention.qk_norm": "head",
        "model.attention.rope_theta": 500_000.0,
        "model.attention.window_pattern": [],
        "model.moe.top_k": 4,
        "model.moe.shared_hidden": config.model.moe.hidden,
        "model.moe.router.gating": "softmax",
        "model.moe.router.normalize": 1.0,
        "model.moe.router.restore_scale": True,
        "model.moe.router.weight_scale": 1.0,
        "model.moe.router.lb_loss": 0.01 if name == "tiny_64e" else 0.005,
        "model.moe.router.lb_granularity": "local",
        "model.moe.router.z_loss": 2e-4,
        "parallel.recompute": "block" if name.startswith("ultra") else "none",
        "precision.params": "bfloat16",
        "precision.compute": "bfloat16",
        "data.sequence_length": 8192,
        "optimizer.betas": [0.9, 0.95],
        "optimizer.eps": 1e-8,
        "optimizer.weight_decay": 0.1,
        "optimizer.clip": 1.0,
        "optimizer.schedule.kind": "constant",
    }
    assert {field: flat[field] for field in shared} == shared


@pytest.mark.parametrize("experts", [8, 32, 48, 64, 128])
def test_the_eight_layer_benchmark_differs_in_its_experts_alone(experts):
    config, basis = (to_dict(load(CONFIGS / f"moe_8l_{e}e.yaml")) for e in (experts, 64))
    changed = {line.partition(":")[0] for line in differences(basis, config)}
    assert changed <= {"model.moe.num_experts", "run.name"}
    assert config["model"]["moe"]["num_experts"] == experts
    assert config["model"]["norm_placement"] == "reordered"
    assert config["model"]["moe"]["router"]["assignment"] == "random"
    assert from_dict(config).model.dense_width == 20_480


# --- overrides -------------------------------------------------------------------------------------------------------


def test_the_last_override_wins_over_earlier_ones_and_over_the_file():
    config = load(CONFIGS / "tiny.yaml", ["model.n_layers=7", "train.steps=5", "model.n_layers=6"])
    assert (config.model.n_layers, config.train.steps) == (6, 5)
    assert config.precision == load(CONFIGS / "tiny.yaml").precision != Config().precision


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.steps=1e3", 1000),
        ("train.steps=1_000", 1000),
        ("optimizer.learning_rate=1e-3", 1e-3),
        ("optimizer.learning_rate=1", 1.0),
        ("optimizer.betas=0.8,0.9", (0.8, 0.9)),
        ("optimizer.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("parallel.mesh=dp=2,ep=8,pp=4", "dp=2,ep=8,pp=4"),
        ("parallel.pipeline.schedule=1f1b", "1f1b"),
        ("data.paths=a,b/c.txt", ("a", "b/c.txt")),
        ("data.paths=one place", ("one place",)),
        ("data.paths=", ()),
        ("data.tokenizer=7", "7"),
        ("run.name=2026-11-30", "2026-11-30"),
        ("run.writers=jsonl,tensorboard", (Writer.jsonl, Writer.tensorboard)),
        ("train.profile=3,5", (3, 5)),
        ("model.attention.window_pattern=64,-1", (64, -1)),
        ("model.embed_scale=null", None),
        ("model.moe.router.normalize=null", None),
        ("model.tie_embeddings=true", True),
        ("model.attention.qk_norm=none", "none"),
    ],
)
def test_overrides_are_read_as_the_type_of_their_field(override, value):
    node = load(None, [override])
    for name in override.partition("=")[0].split("."):
        node = getattr(node, name)
    assert node == value
    assert isinstance(node, type(value))


# --- help ------------------------------------------------------------------------------------------------------------


def test_help_lists_every_leaf_once_in_the_order_of_the_tree():
    assert [field for field, _, _ in help_rows()] == list(LEAVES)


@pytest.mark.parametrize(("field", "default", "sentence"), list(help_rows()), ids=[row[0] for row in help_rows()])
def test_help_gives_a_sentence_and_a_default_that_can_be_written_back(field, default, sentence):
    assert sentence.endswith(".") and "\n" not in sentence
    assert load(None, [f"{field}={default}"]) == Config()


# --- differences -----------------------------------------------------------------------------------------------------


@each_file
def test_a_configuration_does_not_differ_from_itself(path):
    assert differences(to_dict(load(path)), to_dict(load(path))) == []


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.moe.num_experts=64", "model.moe.num_experts: 32 -> 64"),
        ("model.norm_placement=pre", "model.norm_placement: peri -> pre"),
        ("model.tie_embeddings=true", "model.tie_embeddings: false -> true"),
        ("model.embed_scale=2", "model.embed_scale: null -> 2.0"),
        ("model.attention.window_pattern=4,-1", "model.attention.window_pattern: [] -> [4, -1]"),
    ],
)
def test_a_difference_is_told_with_both_values(override, line):
    assert differences(to_dict(Config()), to_dict(load(None, [override]))) == [line]


def test_differences_name_every_changed_field_and_absent_ones():
    old, new = to_dict(Config()), to_dict(load(CONFIGS / "ultra_128e.yaml"))
    changed = {field for field in LEAVES if flatten(old)[field] != flatten(new)[field]}
    assert {line.partition(":")[0] for line in differences(old, new)} == changed
    del new["optimizer"]["clip"]
    assert "optimizer.clip: 1.0 -> absent" in differences(old, new)
    assert "optimizer.clip: absent -> 1.0" in differences(new, old)


# --- unknown keys, wrong types, unreadable input ---------------------------------------------------------------------


def sections(cls: type = Config, prefix: str = "") -> list[str]:
    found = [prefix]
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            found += sections(field.type, f"{prefix}{field.name}.")
    return found


@pytest.mark.parametrize("section", sections())
def test_an_unknown_key_is_named_with_its_section(section):
    assert f"no configuration field {section}qqqq; the fields here are" in refusal(f"{section}qqqq=1")


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("model.n_layer=3", "model.n_layers"),
        ("model.moe.num_expert=3", "model.moe.num_experts"),
        ("optimiser.clip=1", "optimizer"),
        ("train.learning_rate=1", "optimizer.learning_rate"),  # from here on the right name in a wrong section
        ("model.num_experts=8", "model.moe.num_experts"),
        ("moe.num_experts=8", "model.moe"),
        ("model.seed=1", "data.seed or train.seed"),
    ],
)
def test_a_near_miss_is_answered_with_what_was_meant(override, meant):
    assert refusal(override).endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize("field", LEAVES)
def test_every_field_refuses_a_value_of_another_kind_by_name(field):
    sentence = refusal(f"{field}={{a: 1}}")
    assert sentence.startswith(field)


@pytest.mark.parametrize("section", [s.rstrip(".") for s in sections() if s])
def test_a_section_is_no_value(section):
    assert refusal(f"{section}=3").startswith(f"{section} is a section")


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.steps=1.5", "train.steps=1.5 must be a whole number"),
        ("train.steps=many", "train.steps=many must be a whole number"),
        ("train.steps=true", "train.steps=true must be a whole number"),
        ("train.steps=", "train.steps=null must be a whole number"),
        ("train.steps=.nan", "train.steps=nan must be a whole number"),
        ("model.vocab_size=1e400", "model.vocab_size=inf must be a whole number"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate=fast must be a number"),
        ("optimizer.learning_rate=false", "optimizer.learning_rate=false must be a number"),
        ("model.embed_norm=1", "model.embed_norm=1 must be true or false"),
        ("run.name=true", "run.name=true must be text"),
        ("data.tokenizer=null", "data.tokenizer=null must be text"),
        ("optimizer.betas=0.9", "optimizer.betas takes 2 values, not 0.9"),
        ("optimizer.betas=a,b", "optimizer.betas[0]=a must be a number"),
        ("model.attention.window_pattern=64,1.5", "model.attention.window_pattern[1]=1.5 must be a whole number"),
        ("model.norm_placement=PERI", "model.norm_placement=PERI is not one of reordered, peri, pre"),
        ("model.attention.qk_norm=null", "model.attention.qk_norm=null is not one of none, head, full"),
        ("run.writers=jsonl,carrier_pigeon", "run.writers[1]=carrier_pigeon is not one of jsonl, tensorboard, wandb"),
    ],
)
def test_a_wrong_type_is_named_with_what_would_do(override, says):
    assert refusal(override) == f"{says}."


@pytest.mark.parametrize("override", ["train.steps", "=3", "--train.steps=3", "train.steps:3"])
def test_what_is_no_override_is_answered_with_an_example(override):
    assert refusal(override) == (f"'{override}' is not an override; write section.field=value, e.g. train.steps=100.")


@pytest.mark.parametrize("override", ["train.steps=[1", "data.paths=${nowhere}"])
def test_an_override_that_cannot_be_read_is_quoted(override):
    assert override in refusal(override)


@pytest.mark.parametrize(
    "content",
    [
        b"model: {d_model: [1",
        b"model: {d_model: 8, d_model: 9}",
        b"run:\n  name: ${nowhere}\n",
        b"\xff\xfe\x00",
        b"3",
        b"a: !!python/object:os.system x",
    ],
)
def test_a_file_that_cannot_be_read_is_named(content, tmp_path):
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    assert str(path) in refusal(path=path)


def test_a_list_is_no_configuration(tmp_path):
    path = tmp_path / "list.yaml"
    path.write_text("- model\n")
    assert "sections" in refusal(path=path)


def test_an_empty_file_and_empty_sections_are_the_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    for text in ("", "model:\ntrain:\n"):
        path.write_text(text)
        assert load(path) == Config()


def test_a_missing_file_is_answered_with_those_there_are(monkeypatch, tmp_path):
    monkeypatch.chdir(CONFIGS.parent)
    assert "configs/nowhere.yaml; there are: " in refusal(path=Path("configs/nowhere.yaml"))
    assert "configs/tiny.yaml" in refusal(path=Path("configs/nowhere.yaml"))
    monkeypatch.chdir(tmp_path)
    assert refusal(path=Path("nowhere.yaml")) == "There is no configuration file nowhere.yaml."


# --- impossible combinations -----------------------------------------------------------------------------------------

IMPOSSIBLE = [
    # every number that must be greater than 0, or not below it
    *[
        ([f"{field}={value}"], [field])
        for value, fields in {
            0: "model.d_model model.n_layers model.vocab_size model.attention.n_heads model.attention.n_kv_heads "
            "model.attention.head_dim model.moe.num_experts model.moe.top_k model.moe.hidden model.dense_hidden "
            "model.norm_eps model.init_std model.embed_scale model.attention.rope_theta model.moe.router.weight_scale "
            "model.moe.router.normalize parallel.pipeline.microbatches data.sequence_length train.steps "
            "train.batch_tokens checkpoint.keep run.log_every optimizer.eps",
            -1: "model.moe.shared_hidden model.n_dense_layers model.z_loss model.moe.router.lb_loss "
            "model.moe.router.z_loss optimizer.learning_rate optimizer.weight_decay optimizer.clip "
            "optimizer.schedule.warmup_steps optimizer.schedule.decay_steps optimizer.schedule.final_fraction "
            "data.validation_fraction data.seed train.seed train.eval_every train.eval_batches checkpoint.every",
        }.items()
        for field in fields.split()
    ],
    *[
        ([f"{field}={value}"], [field])
        for field, default in LEAVES.items()
        if isinstance(default, float)
        for value in (".nan", ".inf")
    ],
    (["optimizer.betas=0.9,1.0"], ["optimizer.betas", "second"]),
    (["optimizer.betas=-0.1,0.9"], ["optimizer.betas", "first"]),
    (["optimizer.betas=.nan,0.9"], ["optimizer.betas"]),
    (["optimizer.schedule.final_fraction=1.5"], ["optimizer.schedule.final_fraction"]),
    (
        ["optimizer.schedule.kind=wsd", "optimizer.schedule.decay_steps=999"],
        ["optimizer.schedule.decay_steps", "train.steps"],
    ),
    (["data.validation_fraction=1"], ["data.validation_fraction"]),
    (["data.validation_fraction=0"], ["data.validation_fraction", "train.eval_batches"]),
    (["data.seed=4294967296"], ["data.seed"]),
    (["data.weights=1,2", "data.paths=a"], ["data.weights", "data.paths"]),
    (["data.weights=1"], ["data.weights", "data.paths"]),
    (["data.weights=1,0", "data.paths=a,b"], ["data.weights"]),
    (["data.weights=1,.inf", "data.paths=a,b"], ["data.weights"]),
    (["model.attention.n_heads=6", "model.attention.n_kv_heads=4"], ["n_heads=6", "n_kv_heads=4"]),
    (["model.attention.head_dim=33"], ["model.attention.head_dim=33", "even"]),
    (["model.attention.window_pattern=64,0"], ["model.attention.window_pattern", "-1"]),
    (["model.attention.window_pattern=-2"], ["model.attention.window_pattern", "-1"]),
    (
        ["model.attention.implementation=cudnn", "precision.compute=float32"],
        ["model.attention.implementation", "precision.compute"],
    ),
    (["model.n_dense_layers=5"], ["model.n_dense_layers=5", "model.n_layers=4"]),
    (["model.moe.top_k=33"], ["model.moe.top_k=33", "model.moe.num_experts=32"]),
    (
        ["train.batch_tokens=16385"],
        ["train.batch_tokens", "data.sequence_length", "parallel.pipeline.microbatches", "16384"],
    ),
    (["parallel.pipeline.microbatches=128"], ["train.batch_tokens", "microbatches=128", "16384"]),
    (["train.profile=3"], ["train.profile"]),
    (["train.profile=5,3"], ["train.profile"]),
    (["train.profile=3,5,7"], ["train.profile"]),
    (["train.profile=290,301"], ["train.profile", "train.steps=300"]),
    (["run.name="], ["run.name"]),
    (["run.name=a/b"], ["run.name"]),
    (["run.name=.."], ["run.name"]),
    (["run.writers=jsonl,jsonl"], ["run.writers", "jsonl"]),
]


@pytest.mark.parametrize(("overrides", "named"), IMPOSSIBLE, ids=[" ".join(overrides) for overrides, _ in IMPOSSIBLE])
def test_an_impossible_combination_is_one_sentence_naming_the_fields(overrides, named):
    sentence = refusal(*overrides)
    assert [word for word in named if word not in sentence] == []


def test_the_batch_that_is_offered_is_accepted():
    sentence = refusal("train.batch_tokens=50000", "data.sequence_length=192")
    offered = sentence.rstrip(".").rpartition(" ")[2]
    assert load(None, [f"train.batch_tokens={offered}", "data.sequence_length=192"]).train.batch_tokens == int(offered)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optimizer.learning_rate=0"],
        ["optimizer.clip=0", "optimizer.weight_decay=0"],
        ["model.n_dense_layers=0"],
        ["model.n_dense_layers=4"],
        ["model.moe.shared_hidden=0"],
        ["model.moe.top_k=32"],
        ["model.moe.router.lb_loss=0", "model.moe.router.z_loss=0", "model.z_loss=0"],
        ["train.steps=20", "optimizer.schedule.warmup_steps=20"],  # a short trial of a long recipe
        ["train.steps=10", "optimizer.schedule.warmup_steps=2000", "optimizer.schedule.kind=constant"],
        ["data.validation_fraction=0", "train.eval_batches=0"],
        ["checkpoint.every=0", "train.eval_every=0"],
        ["run.writers="],
        ["run.name=a run, the 2nd"],
        ["train.profile=0,1"],
    ],
)
def test_the_edges_of_what_is_possible_are_accepted(overrides):
    assert validate(load(None, overrides)) == load(None, overrides)


def test_a_configuration_made_in_python_is_checked_by_the_same_rules():
    config = dataclasses.replace(Config(), train=dataclasses.replace(Config().train, steps=0))
    with pytest.raises(UserError, match="train.steps"):
        validate(config)
    with pytest.raises(UserError, match="train.steps"):
        config_io.from_dict(to_dict(config))
