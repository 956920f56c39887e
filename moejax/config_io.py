"""Configuration in and out: YAML and dotted overrides to a `Config`, a `Config` to YAML, help, and differences.

    load("configs/tiny.yaml", ["model.moe.num_experts=64"]) -> Config

Every error is one sentence that names the field.
"""

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moejax.config import Config, validate
from moejax.errors import UserError


def load(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file (None: defaults only), apply `a.b=c` overrides left to right, check everything.

    Raises UserError: missing or malformed file, unknown key, wrong type, impossible combination.
    """
    tree = OmegaConf.create({})
    if path is not None:
        if not Path(path).is_file():
            here = sorted(p.as_posix() for p in Path("configs").glob("*.yaml"))
            there_are = f"; there are: {', '.join(here)}." if here else "."
            raise UserError(f"There is no configuration file {path}{there_are}")
        try:
            tree = OmegaConf.load(path)
            OmegaConf.to_container(tree, resolve=True)  # what the file interpolates must be there without overrides too
        except (yaml.YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
            raise UserError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
        if not OmegaConf.is_dict(tree):
            raise UserError(f"{path} must hold sections such as `model:` at its top level.")
    for override in overrides:
        if "=" not in override or override.startswith(("=", "-")):
            raise UserError(f"'{override}' is not an override; write section.field=value, e.g. train.steps=100.")
    try:
        tree = OmegaConf.merge(tree, OmegaConf.from_dotlist(list(overrides)))
        plain = OmegaConf.to_container(tree, resolve=True)
    except (yaml.YAMLError, OmegaConfBaseException, AssertionError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"The overrides {' '.join(overrides)} cannot be read: {reason}.") from error
    return from_dict(plain)


def from_dict(plain: Any) -> Config:
    """A checked `Config` from nested dicts; what is absent keeps its default."""
    return validate(_build(Config, plain, ""))


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain dicts, lists, strings and numbers: what goes into YAML and checkpoints."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def to_yaml(config: Config) -> str:
    """The whole tree as YAML that `load` reads back to an equal `Config`."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=110)


class _Dumper(yaml.SafeDumper):
    """Quotes text such as 1e3, which `load` (OmegaConf) would take for a number and PyYAML alone would not."""

    def text(self, value: str) -> yaml.Node:
        try:
            float(value)
            style = '"'
        except ValueError:
            style = None
        return self.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _Dumper.text)


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"model": {"d_model": 8}} -> {"model.d_model": 8}."""
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """`field: old -> new` for every leaf in which two nested dicts differ."""
    a, b = flatten(old), flatten(new)
    absent = object()
    pairs = {key: (a.get(key, absent), b.get(key, absent)) for key in [*a, *b]}
    shown = {key: ["absent" if v is absent else _spelled(v) for v in pair] for key, pair in pairs.items()}
    return [f"{key}: {shown[key][0]} -> {shown[key][1]}" for key, (x, y) in pairs.items() if x != y]


def help_rows() -> Iterator[tuple[str, str, str]]:
    """(field, default, sentence) of every leaf, in the order of the tree."""

    def walk(cls: type, prefix: str) -> Iterator[tuple[str, str, str]]:
        for field in dataclasses.fields(cls):
            default = field.default_factory() if field.default is dataclasses.MISSING else field.default  # type: ignore[misc]
            if dataclasses.is_dataclass(default):
                yield from walk(type(default), f"{prefix}{field.name}.")
            else:
                yield prefix + field.name, _spelled(_plain(default)), field.metadata["help"]

    return walk(Config, "")


def _spelled(value: Any) -> str:
    """A value as it is written in YAML."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _build(cls: Any, plain: Any, prefix: str) -> Any:
    if plain is None:
        plain = {}
    if not isinstance(plain, dict):
        raise UserError(f"{prefix.rstrip('.')} is a section with fields of its own; write {prefix}FIELD=value.")
    hints, names = typing.get_type_hints(cls), [field.name for field in dataclasses.fields(cls)]
    for key in plain:
        if key not in names:
            near = _elsewhere(key) or [prefix + name for name in difflib.get_close_matches(str(key), names, n=1)]
            hint = f"did you mean {' or '.join(near)}?" if near else f"the fields here are {', '.join(names)}."
            raise UserError(f"There is no configuration field {prefix}{key}; {hint}")
    return cls(**{name: _convert(hints[name], plain[name], prefix + name) for name in names if name in plain})


def _elsewhere(key: str) -> list[str]:
    """Fields and sections of this name in the whole tree: the right name, given in the wrong section."""
    found = [f"{field}.".partition(f".{key}.") for field, _, _ in help_rows()]
    return list(dict.fromkeys(before + f".{key}" for before, match, _ in found if match))


def _convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as the field's type, or a UserError that names the field."""
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where + ".")
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        return _convert(next(a for a in arguments if a is not type(None)), value, where)
    if origin is tuple:
        if value is None:  # data.paths= on a command line
            value = ()
        if isinstance(value, str):  # data.paths=a,b on a command line
            value = [part for part in value.split(",") if part]
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if arguments[-1] is not Ellipsis and len(items) != len(arguments):
            raise UserError(f"{where} takes {len(arguments)} values, not {value!r}.")
        item_type = arguments[0]
        return tuple(_convert(item_type, _number(item_type, item), f"{where}[{i}]") for i, item in enumerate(items))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            # YAML 1.1 reads a bare on or off as a boolean
            return hint(("off", "on")[value] if isinstance(value, bool) else str(value))
        except ValueError:
            choices = ", ".join(member.value for member in hint)
            raise UserError(f"{where}={_spelled(value)} is not one of {choices}.") from None
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():  # 1e6 is a float to YAML
        return int(value)
    if hint is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        kind = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}[hint]
        raise UserError(f"{where}={_spelled(value)} must be {kind}.")
    return value


def _number(hint: Any, item: Any) -> Any:
    """Items of a comma-separated list arrive as text."""
    if isinstance(item, str) and hint in (int, float):
        try:
            return hint(item)
        except ValueError:
            return item
    return item
