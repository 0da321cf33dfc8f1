"""Recipe YAML has one meaning and one written form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ups.config.yaml_subset import dump, parse, paths_in
from ups.errors import ConfigError

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
keys = texts.filter(lambda text: text != "<<")
scalars = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | texts
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(trees)
@settings(max_examples=200, deadline=None)
def test_what_is_written_is_read_back(value: Any) -> None:
    text = dump(value)
    document = parse(text, "x")
    assert same(document.value, value)
    assert dump(document.value) == text
    assert set(document.origins) == set(paths_in(value))


@given(trees)
@settings(max_examples=100, deadline=None)
def test_an_ordinary_yaml_reader_reads_the_same(value: Any) -> None:
    read = yaml.safe_load(dump(value))
    assert same(read, value)


@given(st.text(st.sampled_from("ab:-? #[]{},&*!|>'\"%@`\n\t 01.e~<\\\u0085\ufeff"), max_size=40))
@settings(max_examples=400, deadline=None)
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    try:
        parse(text, "x")
    except ConfigError as error:
        assert error.message.startswith("x:")  # noqa: PT017 - text that can be read is as good


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3), ("1E5", 1e5), ("-.5", -0.5), ("1.", 1.0), ("+12", 12), ("0x1F", 31), ("0o17", 15),
        ("no", "no"), ("NO", "NO"), ("yes", "yes"), ("on", "on"), ("y", "y"), ("true", True), ("False", False),
        ("~", None), ("", None), ("null", None), ("'1'", "1"), ("12:30", "12:30"), ("1_000", "1_000"),
        ("2001-01-01", "2001-01-01"), (".inf", math.inf), ("-.INF", -math.inf), ("9" * 64, int("9" * 64)),
        ("9" * 65, "9" * 65), ("1e", "1e"), ("=", "="), ("1.2.3", "1.2.3"), ("0", 0), ("0.5", 0.5), ("-0", 0),
    ],
)  # fmt: skip
def test_a_scalar_means_what_yaml_1_2_says(text: str, value: Any) -> None:
    assert same(parse(f"a: {text}", "x").value, {"a": value})


def test_the_slow_parser_has_the_same_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(yaml, "CSafeLoader")
    assert parse("a: [1, {b: 'x'}]\n", "x").value == {"a": [1, {"b": "x"}]}
    for text, words in [
        ("[" * 5000, "nested more than"),
        ("a: &x 1", "anchor '&x'"),
        ("a: !!python/name:os 1", "tag '!!python/name:os'"),
        ("a: 1\na: 2", "a: is set twice"),
        ("a: b: c", "a ':' where only a value can stand"),
        ('a: "\\ud800"', "half of a surrogate pair"),
        ("a: [1", "not closed"),
        ("a:\n\tb: 1", "tab in the indentation"),
    ]:
        with pytest.raises(ConfigError, match=words):
            parse(text, "x")
