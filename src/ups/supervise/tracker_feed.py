"""The process of one tracker of one run: `python -m ups.supervise.tracker_feed RUN NAME SECONDS`.

It sends the rows of metrics.jsonl as they come, and at the end what run.json says about the end: the supervisor's
verdict, never its own opinion. It ends when its standard input does: the supervisor holds the other side, so it also
ends when the supervisor is killed, and then says that, within SECONDS. Without standard input it makes one pass, which
is what `ups track sync` does. After an error it starts itself again as a new program: a broken client keeps no state.

Nothing of what a client prints reaches a file as it is: it may hold a secret.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote

from ups.config.recipe import plain_data, resolve
from ups.config.schema import Recipe
from ups.config.setting import is_secret, reveal
from ups.config.tracker import TrackerConfig, by_name
from ups.errors import ConfigError, MissingExtraError, UpsError
from ups.record import processes
from ups.record.files import read_object, try_lock
from ups.record.identity import RunIdentity, file_sha256
from ups.record.log import show_log, write_to_stderr
from ups.record.run_dir import RunDir
from ups.record.text import printable
from ups.registry import TRACKERS
from ups.supervise.run_file import RunDocument, read_run
from ups.supervise.trackers import BUSY, LATE, TrackerNote, read_note
from ups.tracking.metrics_file import new_rows
from ups.tracking.tracker import Ending, TrackedRun, Tracker

ATTACHED = (RunDir.report_page.name, RunDir.scores.name)
# An address that a client has from the environment may hold a password.
_USER_INFORMATION = re.compile(r"(?<=//)[^\s/]*@")
_LOOK_SECONDS = 1.0
_MAX_BACKOFF_SECONDS = 60.0
_RUN_FAILED = 6  # the exit code of a run whose supervisor left none


class Feed:
    """One tracker, from where its note stands to where the run stands."""

    def __init__(self, run_dir: Path, name: str, ended: threading.Event) -> None:
        self._run_dir, self._name, self._ended = run_dir, name, ended
        self._note = TrackerNote()
        self._document: RunDocument = {}  # type: ignore[typeddict-item]

    def run(self) -> None:
        """Feed until told to end, then tell the ending. Raises whatever the client does."""
        if not self._begun():
            return
        recipe = resolve(RunDir(self._run_dir).config).recipe
        config = config_of(recipe, self._name)
        tracker: Tracker = TRACKERS.factory(config.type)(config, self._described(recipe))
        note = self._note
        note.id, note.url = tracker.id, without_secrets(tracker.url, [])
        note.state, note.ended = "", None
        if tracker.first_row is not None:
            self._go_to(tracker.first_row)
        note.save(self._run_dir, self._name)
        while True:
            last = self._ended.is_set()  # asked first: what was written before it was set is sent below
            self._send(tracker)
            if last:
                break
            self._ended.wait(_LOOK_SECONDS)
        self._end(tracker)

    def failed(self, error: BaseException, secrets: Sequence[str]) -> float:
        """Write down why; returns how many seconds to wait before the next try."""
        words = error.one_line() if isinstance(error, UpsError) else f"{type(error).__name__}: {error}"
        self._note.problem = without_secrets(printable(" ".join(words.split())), secrets)[:500]
        self._note.failures += 1
        sys.stderr.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self._note.problem}\n")
        sys.stderr.flush()
        with contextlib.suppress(OSError, UpsError):
            self._note.save(self._run_dir, self._name)
        return float(min(2.0 ** min(self._note.failures, 10), _MAX_BACKOFF_SECONDS))

    def _begun(self) -> bool:
        """Wait until the supervisor has written that the run continues; False if it never was started."""
        while True:
            last = self._ended.is_set()
            with contextlib.suppress(ConfigError):
                self._document = read_run(self._run_dir)
                if last or self._document["state"] == "running":
                    identity = RunIdentity.from_json(self._document.get("identity"))
                    run_id = identity.run_id if identity is not None else self._document["name"]
                    self._note = read_note(self._run_dir, self._name, run_id)
                    return True
            if last:
                return False
            self._ended.wait(0.1)

    def _described(self, recipe: Recipe) -> TrackedRun:
        document = self._document
        identity = RunIdentity.from_json(document.get("identity"))
        environment = read_object(RunDir(self._run_dir).environment) or {}
        facts = {
            "stages": ", ".join(stage.type for stage in recipe.stages),
            "git_commit": str(environment.get("git_commit") or "unknown"),
            "recipe": identity.recipes[-1] if identity is not None and identity.recipes else "unknown",
            "config_sha256": str(environment.get("config_sha256") or "unknown"),
            **{f"data.{task}": value for task, value in (identity.data if identity is not None else {}).items()},
            "ranks": str(document["ranks"]),
            "host": str(document.get("host", "")),
            "directory": str(self._run_dir),
        }
        return TrackedRun(
            self._run_dir, self._note.run_id, document["name"], facts, plain_data(recipe), known=self._note.id
        )

    def _go_to(self, row: int) -> None:
        """Go on with this row: the service knows which ones it has."""
        self._note.rows = self._note.offset = 0
        path = RunDir(self._run_dir).metrics
        while self._note.rows < row:
            # In short steps: the offset of a row is not known before the ones in front of it were read.
            rows, offset = new_rows(path, self._note.offset, row - self._note.rows)
            if not rows:
                return
            self._note.rows, self._note.offset = self._note.rows + len(rows), offset

    def _send(self, tracker: Tracker) -> None:
        """All rows that are there and were not sent."""
        note = self._note
        while True:
            rows, offset = new_rows(RunDir(self._run_dir).metrics, note.offset)
            if not rows:
                return
            for number, row in enumerate(rows, note.rows):
                if row is not None:
                    tracker.log(row, number)
            tracker.flush()
            note.rows, note.offset, note.problem, note.failures = note.rows + len(rows), offset, "", 0
            note.save(self._run_dir, self._name)

    def _end(self, tracker: Tracker) -> None:
        note, document = self._note, read_run(self._run_dir)
        failed = self._attach(tracker)
        state = document["state"]
        if state != "running":  # else the run was started again
            code = document["exit_code"]
            tracker.end(Ending(state, document["cause"], _RUN_FAILED if code is None else code, document["verdict"]))
            note.state, note.ended = state, document["ended"]
        tracker.close()
        note.problem, note.failures = "", 0
        note.save(self._run_dir, self._name)
        if failed is not None:
            raise failed

    def _attach(self, tracker: Tracker) -> Exception | None:
        """Files that are new; returns why one could not be attached: the ending is told all the same."""
        failed = None
        for name in ATTACHED:
            digest = file_sha256(self._run_dir / name)
            if digest and self._note.attached.get(name) != digest:
                try:
                    tracker.attach(self._run_dir / name, name)
                    self._note.attached[name] = digest
                except Exception as error:  # noqa: BLE001 - a place for files may be missing where rows are taken
                    failed = error
        return failed


def check_trackers(trackers: Sequence[TrackerConfig]) -> None:
    """Raise, before anything starts, if the code of a tracker, its package or one of its secrets is not there."""
    for config in trackers:
        TRACKERS.factory(config.type)
        if config.needs is not None and importlib.util.find_spec(config.needs[1]) is None:
            raise MissingExtraError.of(config.needs[0], config.needs[1], f"the tracker '{config.type}'")
        for reference in _references(config):
            reveal(reference)


def _references(config: TrackerConfig) -> list[str]:
    """Of the secrets of a tracker that its settings name."""
    secrets = [getattr(config, name) for name, field in type(config).model_fields.items() if is_secret(field)]
    return [reference for reference in secrets if reference is not None]


def config_of(recipe: Recipe, name: str) -> TrackerConfig:
    """The settings of a tracker by its name. Raises ConfigError if the recipe has none."""
    trackers = by_name(recipe.tracking.trackers)
    if name not in trackers:
        raise ConfigError(f"the recipe of the run has no tracker '{name}'", hint="see tracking.trackers in config.yaml")
    return trackers[name]


def secrets_of(config: TrackerConfig) -> list[str]:
    """The values of a tracker's secrets, as far as they are set."""
    values = []
    for reference in _references(config):
        with contextlib.suppress(UpsError):
            values.append(reveal(reference))
    return values


def without_secrets(text: str, secrets: Sequence[str]) -> str:
    """`text` with every secret taken out, also as it stands in a URL, and without name and password of any URL."""
    for secret in secrets:
        for form in (secret, quote(secret, safe=""), quote(secret)):
            text = text.replace(form, "(redacted)")
    return _USER_INFORMATION.sub("", text)


@contextlib.contextmanager
def _holding(run_dir: Path, name: str, ended: threading.Event) -> Iterator[bool]:
    """Hold the tracker against a second process; False if another one has it and will not leave soon."""
    RunDir(run_dir).tracking.mkdir(exist_ok=True)
    with (RunDir(run_dir).tracking / f".{name}.lock").open("w") as file:
        while True:
            last, free = ended.is_set(), True
            with contextlib.suppress(OSError):  # a file system without locks
                free = try_lock(file.fileno())
            if free or last:
                break
            ended.wait(0.2)
        yield free


def _listen(ended: threading.Event, seconds: float) -> None:
    """Set `ended` when standard input ends or the parent is gone, and leave for good `seconds` later."""
    parent = os.getppid()
    while os.getppid() == parent:
        ready, _, _ = select.select([0], [], [], 1.0)
        if ready and not os.read(0, 4096):
            break
    ended.set()
    time.sleep(seconds)
    _leave(LATE)


def _leave(code: int) -> None:
    """End without the exit hooks of a client, one of which would tell an ending of its own; and end its children."""
    processes.send((child.pid for child in processes.descendants(os.getpid())), signal.SIGKILL)
    os._exit(code)


class _Scrubbed:
    """A text stream into the log of the tracker, without secrets."""

    encoding = "utf-8"

    def __init__(self, path: Path, secrets: Sequence[str]) -> None:
        self._file, self.secrets = path.open("a", buffering=1), list(secrets)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(without_secrets(text, self.secrets))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()

    def isatty(self) -> bool:
        return False


def main(arguments: Sequence[str]) -> None:
    run_dir, name, seconds = Path(arguments[0]), arguments[1], float(arguments[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it leaves with the supervisor, who is asked too
    RunDir(run_dir).tracking.mkdir(exist_ok=True)
    log = _Scrubbed(RunDir(run_dir).tracking / f"{name}.log", [])
    sys.stdout = sys.stderr = log
    show_log(write_to_stderr)
    ended = threading.Event()
    if select.select([0], [], [], 0)[0] and not os.read(0, 4096):
        ended.set()
    last = ended.is_set()
    threading.Thread(target=_listen, args=(ended, seconds), name="ups-told", daemon=True).start()
    feed = Feed(run_dir, name, ended)
    try:
        with _holding(run_dir, name, ended) as held:
            if not held:
                _leave(BUSY)
            with contextlib.suppress(UpsError):
                log.secrets = secrets_of(config_of(resolve(RunDir(run_dir).config).recipe, name))
            feed.run()
    except BaseException as error:  # noqa: BLE001 - whatever a client does, it is written down and tried again
        wait = feed.failed(error, log.secrets)
        if last:
            _leave(1)
        ended.wait(wait)
        processes.send((child.pid for child in processes.descendants(os.getpid())), signal.SIGKILL)
        os.execv(sys.executable, processes.module_command("ups.supervise.tracker_feed", *arguments))  # noqa: S606
    _leave(0)


if __name__ == "__main__":
    main(sys.argv[1:])
