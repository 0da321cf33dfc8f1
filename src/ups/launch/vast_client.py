"""The `vastai` client as a program in an environment of its own: calls that end, and answers that are judged.

It leaves with 0 although the server refused, so what it prints decides. It reads its own key; none passes through here.
What it prints is never passed on as a whole: rows of instances hold variables.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from ups.errors import MachineError
from ups.launch.job import require_program


class VastError(MachineError):
    """Vast, or its client, did not do what was asked."""


class VastSilent(VastError):
    """Vast did not answer: whether it did what was asked is not known."""


class VastClient:
    """program: the client. call_seconds: how long one call may take."""

    def __init__(self, program: str = "vastai", call_seconds: float = 60) -> None:
        self.program = program
        self._call_seconds = call_seconds

    def require(self) -> None:
        """Raise MachineError if there is no client."""
        require_program(self.program, "install it in an environment of its own, and name it: --vastai PATH")

    def offers(self, words: Sequence[str]) -> list[dict[str, Any]]:
        return [row for row in _list(self._json(words)) if isinstance(row.get("id"), int)]

    def create(self, words: Sequence[str]) -> int:
        """The number of the new machine. Raises VastSilent if there may be one whose number is unknown."""
        answer = self._json(words)
        number = answer.get("new_contract") if isinstance(answer, dict) else None
        if not isinstance(number, int) or answer.get("success") is not True:
            said = answer.get("msg") or answer.get("error") if isinstance(answer, dict) else None
            raise VastError(f"Vast does not give the machine: {said or 'no reason'}")
        return number

    def machines(self) -> list[dict[str, Any]]:
        """All machines of the account."""
        return _list(self._json(["show", "instances"]))

    def machine(self, number: int) -> dict[str, Any] | None:
        """One machine; None if there is none of this number."""
        row = self._json(["show", "instance", str(number)])
        return row if isinstance(row, dict) and row.get("id") == number else None

    def destroy(self, number: int) -> None:
        # It prints nothing where it worked.
        self._run(["destroy", "instance", str(number), "--yes", "--raw"], self._call_seconds)

    def log(self, number: int) -> str:
        """The last lines that the machine wrote."""
        return self._run(["logs", str(number), "--tail", "200"], self._call_seconds)

    def secret_names(self) -> set[str]:
        """Names of the variables that the account gives to each of its machines; the client masks their values."""
        answer = self._json(["show", "env-vars"])
        return set(answer) if isinstance(answer, dict) else set()

    def copy(self, words: Sequence[str], seconds: float) -> None:
        self._run(words, seconds)

    def _json(self, words: Sequence[str]) -> Any:
        text = self._run([*words, "--raw"], self._call_seconds)
        try:
            return json.loads(text)
        except ValueError:
            raise VastSilent(f"`{_name(words)}` of vastai printed no answer") from None

    def _run(self, words: Sequence[str], seconds: float) -> str:
        try:
            done = subprocess.run(
                [self.program, *words],
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise VastSilent(f"Vast has not answered `{_name(words)}` for {seconds:g} s") from None
        except OSError as error:
            raise VastError(f"{self.program} cannot be started: {error.strerror}") from None
        refused = _refusal(done.stderr)
        if refused:
            status, said = refused
            # 5xx: something between the client and Vast answered; Vast may have done it.
            kind = VastSilent if status >= 500 else VastError
            raise kind(f"Vast refuses `{_name(words)}`: {status} {said}")
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2][-300:]
            raise VastSilent(f"`{_name(words)}` of vastai failed: {last or f'exit code {done.returncode}'}")
        return done.stdout


def _refusal(text: str) -> tuple[int, str] | None:
    """Status and reason of the error that the client prints as JSON."""
    for line in text.splitlines():
        try:
            answer = json.loads(line)
        except ValueError:
            continue
        if isinstance(answer, dict) and answer.get("error") is True:
            return int(answer.get("status_code") or 0), str(answer.get("msg") or "")[:300]
    return None


def _name(words: Sequence[str]) -> str:
    return " ".join(words[:2])


def _list(answer: Any) -> list[dict[str, Any]]:
    if not isinstance(answer, list):
        raise VastSilent("vastai printed something else than a list")
    return [row for row in answer if isinstance(row, dict)]
