"""Secrets in recipes: only a reference (`${env:NAME}`) is ever written; the value is fetched where it is used.

The reference is kept as text in the recipe, its resolved form, its hash and the run directory, so that none of them
holds a secret. Fields that take a reference are declared with `ups.config.setting.secret`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ups.errors import ConfigError, MachineError

REFERENCE_PATTERN = r"^\$\{env:[A-Za-z_][A-Za-z0-9_]{0,127}\}$"
_REFERENCE = re.compile(REFERENCE_PATTERN)
EXPECTED = "expected a reference to an environment variable, written ${env:NAME}"


def is_reference(text: str) -> bool:
    """Whether `text` is a well-formed reference, and nothing else."""
    return _REFERENCE.fullmatch(text) is not None


def looks_like_reference(text: str) -> bool:
    """Whether `text` tries to be a reference, well-formed or not."""
    return "${" in text


def reveal(reference: str, environment: Mapping[str, str] | None = None) -> str:
    """The secret behind a reference; call it where the secret is used, and keep the result out of files and logs."""
    if not is_reference(reference):
        raise ConfigError(f"a secret: {EXPECTED}", hint="never write the secret itself into a recipe")
    name = reference.removeprefix("${env:").removesuffix("}")
    value = (os.environ if environment is None else environment).get(name, "")
    if not value:
        raise MachineError(f"environment variable '{name}' is not set or empty", hint=f"export {name}=...")
    return value
