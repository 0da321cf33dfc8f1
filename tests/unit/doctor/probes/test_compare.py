"""Two gradients of one batch are equal to rounding, or the doctor says how they differ."""

import pytest
import torch

from ups.doctor.probes.parts import compare_gradients
from ups.run.preflight import CheckFailed

REFERENCE = {"a": torch.linspace(-1, 1, 50, dtype=torch.float64), "b": torch.full((3, 2), 0.25, dtype=torch.float64)}
COUNTS = {"ranks": 4, "micro-batches": 3}


def test_rounding_is_no_difference() -> None:
    gradients = {name: tensor * (1 + 1e-13) for name, tensor in REFERENCE.items()}
    assert compare_gradients(gradients, REFERENCE, "the gradient", COUNTS) < 1e-12


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (4.0, "4 times what it must be (the number of ranks)"),
        (1 / 3, "(1 / the number of micro-batches)"),
        (1.7, "1.7 times what it must be"),
    ],
)
def test_a_wrong_denominator_is_reported_from_other_differences(factor: float, words: str) -> None:
    gradients = {name: tensor * factor for name, tensor in REFERENCE.items()}
    with pytest.raises(CheckFailed) as caught:
        compare_gradients(gradients, REFERENCE, "the gradient", COUNTS)
    assert words in caught.value.message
    assert "denominator" in caught.value.means


def test_other_differences_name_the_parameters() -> None:
    gradients = {**REFERENCE, "b": REFERENCE["b"] + torch.arange(6.0, dtype=torch.float64).reshape(3, 2) * 0.01}
    with pytest.raises(CheckFailed, match="most in b, a"):
        compare_gradients(gradients, REFERENCE, "the gradient", COUNTS)


def test_a_gradient_of_millionths_of_the_whole_is_still_compared() -> None:
    gradients = {**REFERENCE, "b": REFERENCE["b"] * (1 + 1e-5)}
    with pytest.raises(CheckFailed):
        compare_gradients(gradients, REFERENCE, "the gradient", COUNTS)


def test_a_missing_gradient_is_named() -> None:
    with pytest.raises(CheckFailed, match="only one side has a gradient of b"):
        compare_gradients({"a": REFERENCE["a"]}, REFERENCE, "the gradient", COUNTS)


def test_nothing_is_equal_to_not_a_number() -> None:
    gradients = {**REFERENCE, "b": REFERENCE["b"] * float("nan")}
    with pytest.raises(CheckFailed):
        compare_gradients(gradients, REFERENCE, "the gradient", COUNTS)
