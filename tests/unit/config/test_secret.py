"""A recipe names a secret and never holds it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from ups.config.explain import explain
from ups.config.setting import Section, is_reference, reveal, secret, setting
from ups.config.yaml_subset import parse
from ups.errors import ConfigError, MachineError

CANARY = "hunter2-canary"


class Service(Section):
    """A section with a secret."""

    url: str = setting("", "Where it is.")
    token: str | None = secret(None, "Key of the service.")


def mistakes(text: str) -> list[str]:
    document = parse(text, "r.yaml")
    with pytest.raises(ValidationError) as caught:
        Service.model_validate(document.value, strict=True)
    return [e.one_line() for e in explain(caught.value.errors(), Service, document.value, document.origins)]


def test_a_reference_is_kept_as_text_and_revealed_only_on_request() -> None:
    service = Service(token="${env:SERVICE_TOKEN}")
    assert service.model_dump() == {"url": "", "token": "${env:SERVICE_TOKEN}"}
    assert reveal(str(service.token), {"SERVICE_TOKEN": CANARY}) == CANARY


@pytest.mark.parametrize("written", [f"token: {CANARY}", f"token: [{CANARY}]", f"token: '${{env:}}{CANARY}'"])
def test_a_secret_written_out_is_refused_and_not_repeated(written: str) -> None:
    lines = mistakes(written)
    assert len(lines) == 1
    assert CANARY not in lines[0]
    assert lines[0].startswith("config: r.yaml:1: ")


def test_a_secret_that_is_a_number_is_not_repeated_either() -> None:
    assert mistakes("token: 8675309") == ["config: r.yaml:1: token = (hidden): expected text -> Key of the service."]


def test_the_line_for_a_secret_written_out() -> None:
    assert mistakes(f"token: {CANARY}") == [
        "config: r.yaml:1: token is a secret: expected a reference to an environment variable, written ${env:NAME}, "
        "never the secret itself"
    ]


def test_a_reference_in_a_field_that_nobody_resolves_is_refused() -> None:
    assert "url does not take ${...} references" in mistakes("url: http://x/${env:HOST}")[0]


@pytest.mark.parametrize("text", ["${env:A}", "${env:_a1}"])
def test_well_formed_references(text: str) -> None:
    assert is_reference(text)


@pytest.mark.parametrize(
    "text",
    ["", "$A", "${A}", "${env:}", "${env:1A}", "${env:A}x", " ${env:A}", "${env:A}\n", "${file:/x}", "${env:A-B}"],
)
def test_malformed_references(text: str) -> None:
    assert not is_reference(text)
    with pytest.raises(ConfigError):
        reveal(text, {"A": "1"})


@pytest.mark.parametrize("environment", [{}, {"A": ""}])
def test_an_absent_secret_names_its_variable(environment: dict[str, Any]) -> None:
    with pytest.raises(MachineError, match="'A' is not set"):
        reveal("${env:A}", environment)
