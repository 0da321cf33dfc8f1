"""What the engine writes into the black box of its rank, and a box that keeps nothing where there is no supervisor."""

from __future__ import annotations

from typing import Protocol

from ups.record.blackbox import Phase


class StepRecorder(Protocol):
    """The part of `ups.record.blackbox.BlackBox` that the loop uses."""

    loss: float
    total_steps: int

    def record(
        self,
        phase: Phase,
        step: int,
        stage: int = 0,
        collective: int = 0,
        batch: int = 0,
        *,
        deadline_seconds: float = 0.0,
    ) -> None: ...

    def issue(
        self,
        operation: str,
        phase: Phase,
        step: int,
        stage: int = 0,
        *,
        deadline_seconds: float = 0.0,
        usual_seconds: float = 0.0,
    ) -> None: ...


class NoRecorder:
    """Keeps nothing."""

    loss = 0.0
    total_steps = 0

    def record(
        self,
        phase: Phase,
        step: int,
        stage: int = 0,
        collective: int = 0,
        batch: int = 0,
        *,
        deadline_seconds: float = 0.0,
    ) -> None:
        return

    def issue(
        self,
        operation: str,
        phase: Phase,
        step: int,
        stage: int = 0,
        *,
        deadline_seconds: float = 0.0,
        usual_seconds: float = 0.0,
    ) -> None:
        return
