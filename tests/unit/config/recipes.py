"""Random sound recipes for the property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

# Any text that a file can hold; references to secrets have tests of their own.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda text: "${" not in text)
names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,15}", fullmatch=True)
fractions = st.floats(0, 0.45)


def mapping(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional=optional)


tasks = mapping(
    {"name": texts, "path": texts | st.lists(texts, max_size=3)},
    {"weight": st.floats(1e-300, 1e6), "antialias": st.booleans(), "valid_fraction": fractions}
    | {"time_stride": st.integers(1, 10_000), "test_fraction": fractions},
)
optims = mapping({}, {"type": st.sampled_from(["adamw", "sgd"]), "learning_rate": st.floats(1e-12, 10)})
autoencode = mapping(
    {"type": st.just("autoencode"), "steps": st.integers(1, 10**9)},
    {"optim": optims, "inverse_weight": st.floats(0, 100)},
)
operator = mapping(
    {"type": st.just("operator"), "budget_seconds": st.floats(1e-3, 1e9)},
    {"optim": optims, "loss": st.sampled_from(["relative_l2", "mse"]), "augment": st.booleans()},
)
engines = mapping(
    {},
    {"precision": st.sampled_from(["float32", "bfloat16", "float64"]), "compile": st.booleans()}
    | {"threads": st.none() | st.integers(1, 1024), "ema": mapping({}, {"decay": st.floats(0, 0.9999)})},
)
recipes = mapping(
    {
        "run": mapping(
            {"name": names}, {"dir": st.none() | texts.filter(str.isprintable), "seed": st.integers(0, 2**63 - 1)}
        ),
        "data": mapping(
            {"tasks": st.lists(tasks, min_size=1, max_size=3, unique_by=lambda task: task["name"])},
            {"batch_size": st.integers(1, 10**6), "tasks_per_step": st.none() | st.integers(1, 1000)},
        ),
        "model": st.just({"type": "latent_operator"}),
        "stages": st.lists(autoencode | operator, min_size=1, max_size=3),
    },
    {"version": st.just(1), "engine": engines},
)
