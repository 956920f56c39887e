"""How a setting is declared and refused: shared by the modules that together are the configuration tree."""

import dataclasses
from typing import Any

from moejax.errors import UserError


def option(default: Any, sentence: str) -> Any:
    """A field with a default and the sentence that `--help` prints for it."""
    if isinstance(default, (list, dict)) or dataclasses.is_dataclass(default):
        factory = type(default) if dataclasses.is_dataclass(default) else lambda: type(default)(default)
        return dataclasses.field(default_factory=factory, metadata={"help": sentence})
    return dataclasses.field(default=default, metadata={"help": sentence})


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UserError(sentence)
