"""An agreement is issued and read in turn, and notices ranks that have lost each other."""

from __future__ import annotations

import math

import pytest
import torch

from ups.distributed.agreement import Agreement, Status, from_all, from_first
from ups.errors import DistributedError


def agreed(*flags: int) -> Agreement:
    """An agreement whose reduction gave these flags."""
    agreement = Agreement(None)
    agreement.issue(1, Status())
    agreement._flags[:] = torch.tensor(flags)
    return agreement


def test_one_rank_agrees_with_itself() -> None:
    agreement = Agreement(None)
    agreement.issue(7, Status(stop=15, save=1, elapsed_ppm=3, total_steps=9, gradient_norm=0.25))
    assert agreement.read() == Status(15, 1, 3, 9, 0.25)


def test_issue_and_read_take_turns() -> None:
    agreement = Agreement(None)
    with pytest.raises(DistributedError, match="read before it was issued"):
        agreement.read()
    agreement.issue(1, Status())
    with pytest.raises(DistributedError, match="issued before the last one was read"):
        agreement.issue(2, Status())


def test_ranks_at_different_steps_are_noticed() -> None:
    with pytest.raises(DistributedError, match="different steps: 4 to 5"):
        agreed(0, 0, 0, 0, 5, -4, 0, 0).read()


def test_ranks_that_train_apart_are_noticed_by_their_gradient_norms() -> None:
    import struct

    def bits(x: float) -> int:
        return int(struct.unpack("<q", struct.pack("<d", x))[0])

    with pytest.raises(DistributedError, match="different gradients after the reduction of step 4"):
        agreed(0, 0, 0, 0, 5, -5, bits(1.01), -bits(1.0)).read()
    with pytest.raises(DistributedError, match="different gradients"):
        agreed(0, 0, 0, 0, 5, -5, bits(math.inf), -bits(1.0)).read()
    assert agreed(0, 0, 0, 0, 5, -5, bits(1.0 + 1e-9), -bits(1.0)).read().stop == 0


def test_a_norm_that_is_not_finite_on_all_ranks_is_an_agreement() -> None:
    agreement = Agreement(None)
    agreement.issue(1, Status(gradient_norm=math.nan))
    assert agreement.read().gradient_norm == math.inf


def test_without_a_group_a_rank_hears_itself() -> None:
    assert from_first("x", None) == "x"
    assert from_all(3, None) == [3]
