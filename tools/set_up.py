"""Brings .venv up to date with pyproject.toml: what `make setup`, `make train` and `make test` do first.

    .cache/set_up.lock (one at a time) -> is .venv/moejax_setup.json of this pyproject.toml? done
      -> .cache/set_up.unfinished written -> .venv made or reused -> editable install -> stamp written -> mark removed

The stamp is written last and the mark is removed after it, so that a set-up that was killed never passes for done: the
next one finds the mark and starts again from an empty folder. Runs in the interpreter that the environment is made of
(tools/find_python.sh), with the standard library alone. Installs with uv where there is one, else with the venv's pip.
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

MINIMUM = (3, 12)


class SetUpError(Exception):
    """One sentence that says what failed and what to do."""


def wanted_extras(text: str) -> list[str]:
    return sorted({name.strip() for name in text.split(",") if name.strip()})


def fingerprint(root: Path) -> str:
    """Changes with the text of pyproject.toml, not with its date (git touches files on checkout), and with the folder,
    as an environment does not survive being moved."""
    return hashlib.sha256((root / "pyproject.toml").read_bytes() + str(root).encode()).hexdigest()


def read_stamp(venv: Path) -> dict:
    try:
        stamp = json.loads((venv / "moejax_setup.json").read_text())
        return {"fingerprint": str(stamp["fingerprint"]), "extras": [str(name) for name in stamp["extras"]]}
    except (OSError, ValueError, KeyError, TypeError):
        return {"fingerprint": "", "extras": []}


def python_works(python: Path) -> bool:
    """Whether the environment's interpreter still runs; the Python it points to may have been removed."""
    check = f"import sys; sys.exit(sys.version_info < {MINIMUM})"
    try:
        return subprocess.run([python, "-c", check], stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


def is_current(root: Path, extras: list[str]) -> bool:
    venv = root / ".venv"
    stamp = read_stamp(venv)
    return (
        stamp["fingerprint"] == fingerprint(root)
        and set(extras) <= set(stamp["extras"])
        and not (root / ".cache" / "set_up.unfinished").exists()
        and (venv / "bin" / "python").exists()
    )


def remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def call(command: list, what: str) -> None:
    try:
        code = subprocess.run([str(part) for part in command], stdin=subprocess.DEVNULL).returncode
    except OSError as error:
        raise SetUpError(f"Set-up failed while {what}: {error}.") from error
    if code != 0:
        raise SetUpError(f"Set-up failed while {what}: the lines above say why; mend that and call make again.")


def find_uv() -> str | None:
    """uv's path if it runs: a pyenv shim may stand for a uv that is not switched on."""
    path = shutil.which("uv")
    if path and subprocess.run([path, "--version"], capture_output=True).returncode == 0:
        return path
    return None


@contextlib.contextmanager
def alone(path: Path):
    """Holds the lock file; waits while another set-up of the same folder has it, and says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("set-up: waiting for another one in this folder", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def install(root: Path, extras: list[str]) -> None:
    venv, unfinished = root / ".venv", root / ".cache" / "set_up.unfinished"
    python = venv / "bin" / "python"
    if unfinished.exists():
        print("set-up: the last one was interrupted; starting again", flush=True)
        remove(venv)
    unfinished.touch()
    uv = find_uv()
    if not python_works(python):
        remove(venv)
        print(f"set-up: Python {sys.version.split()[0]} into .venv", flush=True)
        maker = [uv, "venv", "--quiet", "--python", sys.executable] if uv else [sys.executable, "-m", "venv"]
        call([*maker, venv], "making .venv")
    target = f"{root}[{','.join(extras)}]" if extras else str(root)
    print(f"set-up: installing moejax with {', '.join(extras) or 'no extras'} (once, a minute or so)", flush=True)
    if uv:
        # bytecode at once, as pip does: where Python may not write its own, each of the many processes would parse all
        call([uv, "pip", "install", "--compile-bytecode", "--python", python, "--editable", target], "installing")
    else:
        if subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode != 0:
            call([python, "-m", "ensurepip"], "adding pip to .venv")
        call([python, "-m", "pip", "install", "--quiet", "--editable", target], "installing")
    partial = venv / "moejax_setup.json.partial"
    partial.write_text(json.dumps({"fingerprint": fingerprint(root), "extras": extras}) + "\n")
    partial.replace(venv / "moejax_setup.json")
    unfinished.unlink()


def set_up(root: Path, extras: list[str]) -> None:
    """Makes .venv current.

    Extras asked for earlier stay: `make train` after `make setup EXTRAS=cuda13` changes nothing.
    """
    if is_current(root, extras):
        return
    with alone(root / ".cache" / "set_up.lock"):
        if is_current(root, extras):
            return
        start = time.monotonic()
        install(root, sorted({*extras, *read_stamp(root / ".venv")["extras"]}))
        print(f"set-up: done in {time.monotonic() - start:.0f} s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Brings .venv up to date with pyproject.toml.")
    parser.add_argument("--extras", default="", help="comma-separated extras of pyproject.toml")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 0 if .venv is current, 1 if not")
    arguments = parser.parse_args()
    root, extras = Path(__file__).resolve().parents[1], wanted_extras(arguments.extras)
    if arguments.check:
        return 0 if is_current(root, extras) else 1
    try:
        set_up(root, extras)
    except SetUpError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"Set-up failed: {error}.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Set-up interrupted: the next call starts it again.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
