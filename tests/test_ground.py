"""The ground stays level: packaging, imports, layers, sizes, and a set-up that cannot half succeed.

pyproject.toml -> extras, dependencies, bounds
sources (as syntax trees) -> which module imports which, third-party names, lines
tools/find_python.sh, tools/set_up.py -> run on made-up machines and folders
"""

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("moejax", "pallas_kernels")
EXTRAS = {"cuda12", "cuda13", "aot", "port", "tensorboard", "wandb", "notebooks", "test"}
LEFT_OUT = {".git", ".venv", ".cache", ".hypothesis", ".pytest_cache", ".ruff_cache", "__pycache__", "runs", "build"}
# Distribution -> the name it is imported by, where they differ.
IMPORT_NAMES = {"absl-py": "absl", "orbax-checkpoint": "orbax", "pyyaml": "yaml", "tensorboardx": "tensorboardX"}


def distribution(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def files(*suffixes: str) -> list[Path]:
    """Every file of the project, without what set-up and runs leave behind."""
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.endswith(".egg-info")]
        found += [Path(folder) / name for name in names if not suffixes or name.endswith(suffixes)]
    return sorted(found)


def sources(package: str) -> list[Path]:
    return [path for path in files(".py") if path.relative_to(ROOT).parts[0] == package]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> set[str]:
    """Absolute dotted names that a file imports, anywhere in it: `from a.b import c` gives a.b and a.b.c."""
    module = module_name(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if node.level else []
            base = ".".join([*parts[: len(parts) - max(node.level - 1, 0)], *(node.module or "").split(".")]).strip(".")
            names |= {base} | {f"{base}.{alias.name}" for alias in node.names}
    return names


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


MODULES = [module_name(path) for package in PACKAGES for path in sources(package)]


# --- packaging -------------------------------------------------------------------------------------------------------


def test_the_promised_extras_exist():
    assert set(project()["optional-dependencies"]) == EXTRAS


def test_every_requirement_is_bounded_on_both_sides():
    lists = [project()["dependencies"], *project()["optional-dependencies"].values()]
    for requirement in (entry for entries in lists for entry in entries):
        if distribution(requirement) != "moejax":
            assert ">=" in requirement and "<" in requirement, requirement


def test_every_package_that_the_library_imports_is_declared():
    lists = [project()["dependencies"], *project()["optional-dependencies"].values()]
    declared = {distribution(requirement) for entries in lists for requirement in entries}
    known = {*PACKAGES, *sys.stdlib_module_names}
    known |= {IMPORT_NAMES.get(name, name.replace("-", "_")) for name in declared}
    for path in (path for package in PACKAGES for path in sources(package)):
        unknown = {name.split(".")[0] for name in imported_names(path)} - known
        assert not unknown, f"{path.relative_to(ROOT)} imports {sorted(unknown)}, which pyproject.toml does not name"


# --- imports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_every_module_imports(module):
    importlib.import_module(module)


def test_importing_the_library_starts_no_backend_and_no_extra():
    """Device simulation is set up after import, so an array made at import would fix the device count at one."""
    code = f"""
import importlib, sys
for name in {MODULES!r}:
    importlib.import_module(name)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a module makes an array or asks for devices when imported"
extras = {{"torch", "transformers", "wandb", "tensorboardX", "matplotlib"}} & set(sys.modules)
assert not extras, f"{{sorted(extras)}} belong to extras and are imported by everybody"
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("pallas_kernels", "moejax"),
        ("moejax.models", "moejax.parallel"),
        ("moejax.moe", "moejax.parallel"),
        ("moejax", "tests"),
    ],
)
def test_arrows_point_one_way(package, forbidden):
    for path in sources(package.split(".")[0]):
        if within(module_name(path), package):
            wrong = sorted(name for name in imported_names(path) if within(name, forbidden))
            assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}: {package} stands below {forbidden}"


def test_imported_names_sees_every_way_of_importing(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "a" / "b" / "c.py"
    path.parent.mkdir(parents=True)
    path.write_text("import os.path\nfrom . import d\nfrom ..e import f\ndef g():\n    from h.i import j as k\n")
    assert imported_names(path) == {"os.path", "a.b", "a.b.d", "a.e", "a.e.f", "h.i", "h.i.j"}


# --- what lies in the folder -----------------------------------------------------------------------------------------


def test_no_python_file_holds_a_second_idea():
    long = {str(path.relative_to(ROOT)): n for path in files(".py") if (n := len(path.read_text().splitlines())) >= 550}
    assert not long, f"over 550 lines: {long}"


def test_no_lock_file():
    names = re.compile(r".*\.lock(b|file)?$|.*-lock\.(json|ya?ml)$|requirements.*\.txt$")
    assert not [str(path) for path in files() if names.match(path.name)]


def test_no_file_names_a_package_index():
    """Where packages come from is each machine's own setting. (The brackets keep this file from finding itself.)"""
    index = re.compile(
        r"py[p]i\.org|python[h]osted\.org|registry\.n[p]mjs|registry\.y[a]rnpkg|download\.py[t]orch\.org|conda\.an[a]conda"
        r"|pypi\.nv[i]dia|deb\.de[b]ian\.org|--(extra-)?index-[u]rl|--find-[l]inks|tool\.uv\.ind[e]x"
    )
    text = (".py", ".md", ".toml", ".yaml", ".yml", ".ipynb", ".sh", ".cfg", ".ini", ".json", "Makefile", "run", ".txt")
    found = {str(path): match[0] for path in files(*text) if (match := index.search(path.read_text(errors="replace")))}
    assert not found


# --- the session every test runs in ----------------------------------------------------------------------------------


def test_sixteen_devices_on_cpu():
    if jax.default_backend() != "cpu":
        pytest.skip("simulated devices are for CPU")
    assert jax.device_count() == 16


# --- set-up ----------------------------------------------------------------------------------------------------------


def program(folder: Path, name: str, text: str) -> Path:
    """An executable shell script `name` in `folder`."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


def find_python(path: Path, **variables: str) -> subprocess.CompletedProcess:
    """tools/find_python.sh on a machine that has bash, two core tools, and what lies in `path`."""
    for tool in ("bash", "sort", "grep"):
        if not (path / tool).exists():
            (path / tool).symlink_to(str(shutil.which(tool)))
    environment = {"PATH": str(path), "HOME": str(path), **variables}
    command = [str(path / "bash"), str(ROOT / "tools" / "find_python.sh")]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture
def bare(tmp_path):
    """A PATH with two unfit interpreters: a real one that believes it is 3.11, and a shim that is switched off."""
    path = tmp_path / "bin"
    old = "import sys; sys.version_info = (3, 11, 9); exec(sys.argv[2])"
    program(path, "python3", f"exec '{sys.executable}' -c '{old}' \"$@\"")
    program(path, "python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    return path


def test_find_python_says_what_to_install(bare):
    done = find_python(bare)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1 and "install" in done.stderr


def test_find_python_takes_one_from_path(bare):
    program(bare, "python3.12", "echo /from/path")
    assert find_python(bare).stdout == "/from/path\n"


def test_find_python_takes_one_from_a_pyenv_root_with_a_space(bare, tmp_path):
    program(tmp_path / "my pyenv" / "versions" / "3.12.9" / "bin", "python", "echo /from/pyenv")
    assert find_python(bare).returncode == 1
    assert find_python(bare, PYENV_ROOT=str(tmp_path / "my pyenv")).stdout == "/from/pyenv\n"


def test_find_python_asks_uv_last(bare, tmp_path):
    own = program(tmp_path, "uv's own python", "echo /from/uv")
    program(bare, "uv", f'[ "$1" = python ] && echo "{own}"; exit 0')
    assert find_python(bare).stdout == "/from/uv\n"
    program(bare, "python3.12", "echo /from/path")
    assert find_python(bare).stdout == "/from/path\n"


def test_find_python_does_not_replace_the_one_asked_for(bare):
    program(bare, "uv", "exit 0")  # with uv at hand an interpreter needs no ensurepip
    program(bare, "python3.12", "echo /from/path")
    assert find_python(bare, MOEJAX_PYTHON=sys.executable).stdout == f"{sys._base_executable}\n"
    done = find_python(bare, MOEJAX_PYTHON="/nowhere/python")
    assert done.returncode == 1 and "/nowhere/python" in done.stderr


@pytest.fixture
def set_up(tmp_path, monkeypatch):
    """tools/set_up.py over a folder of its own, where installing is a line in the list `calls`, or fails on demand."""
    spec = importlib.util.spec_from_file_location("set_up", ROOT / "tools" / "set_up.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "pyproject.toml").write_text("first")
    module.calls, module.fail = [], None

    def call(command, what):
        module.calls.append(what)
        if what == "making .venv":
            (tmp_path / ".venv" / "bin").mkdir(parents=True)
            (tmp_path / ".venv" / "bin" / "python").symlink_to(sys.executable)
        elif module.fail:
            raise module.fail

    monkeypatch.setattr(module, "call", call)
    monkeypatch.setattr(module, "find_uv", lambda: "uv")
    return module


def test_set_up_runs_once_and_again_when_pyproject_changes(set_up, tmp_path):
    set_up.set_up(tmp_path, ["test"])
    assert set_up.calls == ["making .venv", "installing"] and set_up.is_current(tmp_path, ["test"])
    (tmp_path / "pyproject.toml").touch()
    set_up.set_up(tmp_path, ["test"])
    assert len(set_up.calls) == 2, "a new date is no change"
    (tmp_path / "pyproject.toml").write_text("second")
    set_up.set_up(tmp_path, ["test"])
    assert set_up.calls[2:] == ["installing"]


def test_set_up_keeps_extras_of_earlier_calls(set_up, tmp_path):
    set_up.set_up(tmp_path, ["cuda13", "test"])
    set_up.set_up(tmp_path, ["test"])
    assert len(set_up.calls) == 2
    set_up.set_up(tmp_path, ["port"])
    assert json.loads((tmp_path / ".venv" / "moejax_setup.json").read_text())["extras"] == ["cuda13", "port", "test"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), SystemExit(1)])
def test_an_interrupted_set_up_never_passes_for_done(set_up, tmp_path, interruption):
    set_up.fail = interruption
    with pytest.raises(type(interruption)):
        set_up.set_up(tmp_path, ["test"])
    assert (tmp_path / ".venv").exists() and not set_up.is_current(tmp_path, ["test"])
    (tmp_path / ".venv" / "half_a_package").touch()
    set_up.fail = None
    set_up.set_up(tmp_path, ["test"])
    assert set_up.is_current(tmp_path, ["test"]) and not (tmp_path / ".venv" / "half_a_package").exists()


def test_a_moved_or_broken_environment_is_made_again(set_up, tmp_path):
    set_up.set_up(tmp_path, ["test"])
    (tmp_path / ".venv" / "bin" / "python").unlink()
    (tmp_path / ".venv" / "bin" / "python").symlink_to("/nowhere/python")
    assert not set_up.is_current(tmp_path, ["test"])
    set_up.set_up(tmp_path, ["test"])
    assert set_up.calls.count("making .venv") == 2 and set_up.is_current(tmp_path, ["test"])
