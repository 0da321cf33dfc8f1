"""The tutorial of docs/doubt.md, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

PAGE = Path(__file__).parents[2] / "docs" / "doubt.md"


def test_the_tutorial_says_what_the_shipped_model_does() -> None:
    section = PAGE.read_text().split("## A tutorial")[1].split("\n## ")[0]
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", section, flags=re.M | re.S):
        exec(compile(block, str(PAGE), "exec"), names)
    usual = names["results"]["two sines"]
    assert round(float(usual.p_value[-1]), 2) == 0.95
    assert int(usual.outside_at) == 0
    assert np.allclose(usual.u_error.values[[0, -1]], [0.0086, 0.00045], rtol=0.02)
    for name in ("short waves", "a box"):
        assert round(float(names["results"][name].p_value[-1]), 4) == 0.0039
        assert int(names["results"][name].outside_at) == 1
    assert "waves 28 to 31 along x is 0.566" in names["results"]["short waves"].attrs["warnings"]
    assert not names["stopped"].u.notnull().any()
    assert int(names["thin"].outside_at) == 1
    assert "nu=0.005 is outside the training range" in names["thin"].attrs["warnings"]
