"""The trainings of the protocol: each is `ups train` on one of its recipes, in a process of its own.

The scores are those that `ups train` leaves in the run's bundle, so that a row of the table can be repeated by hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.protocol import step_cost
from benchmarks.protocol.measure import machine, peak_memory, rollout_sticks
from benchmarks.protocol.page import markdown
from benchmarks.protocol.recipes import (
    CPU_SECONDS,
    MODELS,
    OF_PLUGIN,
    PLUGIN,
    REFERENCE,
    SECOND_SEED,
    VERSION,
    Entry,
    entries,
    kept_scores,
    row,
)
from ups.config.identity import learned
from ups.config.schema import Recipe
from ups.config.yaml_subset import dump
from ups.errors import ConfigError, DataError, TrainingError, exit_code_of_signal
from ups.evaluation.results import from_json, to_json
from ups.record import processes
from ups.record.files import write_file_atomically
from ups.registry import use_script
from ups.run.directory import read_run_recipe
from ups.run.progress_line import ProgressLine
from ups.solvers.tasks import BENCH_TASKS
from ups.supervise.run_file import hold_lock

# Machines whose fixed piece of work takes so many times as long are not of one kind.
_OTHER_SPEED = 1.25
LOCK_NAME = ".bench.lock"
# Settings that kept rows lack, and what held for those; others were off.
_BEFORE = {"schedule": "cosine"}


def plugin_of(trained: Sequence[Entry]) -> list[str]:
    """The options that bring the models of these recipes which the package does not have."""
    return ["--plugin", str(PLUGIN)] if any(entry.recipe["model"]["type"] in OF_PLUGIN for entry in trained) else []


class Bench:
    """One benchmark directory: recipes/, runs/, logs/, results/, pictures/, costs.json, bench.json, bench.md."""

    def __init__(
        self, models: list[str], tasks: list[str], data: Path, out: Path, *, cpu_seconds: float, small: bool
    ) -> None:
        self.models, self.tasks, self.out = models, tasks, out.resolve()
        self.data = data.resolve()
        self.second_data = self.data.with_name(f"{self.data.name}-seed{SECOND_SEED}")
        self.cpu_seconds, self.small = cpu_seconds, small
        self.page, self.result = self.out / "bench.md", self.out / "bench.json"
        self.costs = self.out / "costs.json"
        self._working: set[subprocess.Popen[bytes]] = set()
        self._measuring = threading.Lock()  # CPU time is counted for the whole process

    def run(self, jobs: int, line: ProgressLine) -> dict[str, Any]:
        """Whatever is not there yet, then the result (also written to disk). A failed training leaves a gap."""
        # Two of them would train the same rows by other costs.
        who, hint = "another benchmark is at work in", "wait for it, or choose another --out"
        with hold_lock(self.out / LOCK_NAME, who, hint):
            return self._run(jobs, line)

    def _run(self, jobs: int, line: ProgressLine) -> dict[str, Any]:
        for name in ("recipes", "logs", "results"):
            (self.out / name).mkdir(parents=True, exist_ok=True)
        self._generate(line)
        wanted = entries(self.models, self.tasks, os.path.relpath(self.data, self.out), self.cpu_seconds)
        if plugin_of(wanted):
            use_script(PLUGIN)
        # One seed of everything first; the longest before those that fill the time next to it.
        wanted.sort(key=lambda entry: (entry.seed, -len(entry.tasks)))
        wanted = self._with_steps(wanted, jobs, line)
        rows, identities = self._references()
        failed = self._train_all(wanted, identities, jobs, line)
        for entry, code in zip(wanted, failed, strict=True):
            if not code:
                rows += self.kept_rows(entry, identities) or []
        document = {
            "protocol": VERSION if not self.small else f"{VERSION} (small data, not comparable)",
            "command": self._command(jobs),
            "cpu_seconds_per_task": self.cpu_seconds,
            "machine": machine(),
            "data": identities,
            "failures": [entry.name for entry, code in zip(wanted, failed, strict=True) if code],
            "rows": rows,
        }
        plain: dict[str, Any] = to_json(document)
        write_file_atomically(self.result, (json.dumps(plain, indent=1) + "\n").encode())
        self._write_page(document)
        return plain

    def write_page(self) -> dict[str, Any]:
        """The page and its pictures again, from the result that is on disk."""
        if not self.result.is_file():
            raise DataError(
                f"{self.result} does not exist: there is no result to show yet",
                hint="start it without --page-only; what is finished is not trained again",
            )
        try:
            plain: dict[str, Any] = json.loads(self.result.read_text())
            document = from_json(plain)
            missing = {"rows", "data", "machine"} - document.keys()
        except (ValueError, AttributeError) as error:
            raise DataError(f"{self.result} is damaged: {error}", hint="remove it and start again") from error
        if missing:
            raise DataError(f"{self.result} is not a result of the protocol: it has no {', '.join(sorted(missing))}")
        self._write_page(document)
        return plain

    def _write_page(self, document: dict[str, Any]) -> None:
        from benchmarks.protocol.pictures import write_pictures

        pictures = write_pictures(document, self.out, self.data)
        write_file_atomically(self.page, markdown(document, pictures).encode())

    def _command(self, jobs: int) -> str:
        """What repeats this result on another machine."""
        words = ["python -m benchmarks.protocol"]
        words += [f"--model {name}" for name in self.models] if len(self.models) < len(MODELS) else []
        words += [f"--task {name}" for name in self.tasks] if len(self.tasks) < len(BENCH_TASKS) else []
        words += [f"--cpu-seconds {self.cpu_seconds:g}"] if self.cpu_seconds != CPU_SECONDS else []
        words += ["--small"] if self.small else []
        words += [f"--jobs {jobs}"] if jobs > 1 else []
        return " ".join(words)

    def _generate(self, line: ProgressLine) -> None:
        from ups.solvers.request import BENCH_TRAJECTORIES, SMALL_TRAJECTORIES, make_request
        from ups.solvers.sweep import generate

        counts = SMALL_TRAJECTORIES if self.small else BENCH_TRAJECTORIES
        for folder, seed, trajectories in (
            (self.data, 0, counts),
            (self.second_data, SECOND_SEED, (1, 0, counts[-1])),
        ):
            generate(
                [make_request(task, trajectories=trajectories, seed=seed) for task in self.tasks],
                folder,
                num_processes=len(os.sched_getaffinity(0)),
                on_progress=lambda done, total, task: line.count(f"data of {task}", done, total, "chunks"),
            )

    def _with_steps(self, wanted: list[Entry], jobs: int, line: ProgressLine) -> list[Entry]:
        """The entries with numbers of steps in place of budgets. What is measured once is kept, for later calls."""
        found = self._read_costs(line)

        # Seeds of a model cost alike: one of them is measured.
        missing: dict[str, Entry] = {}
        for entry in wanted:
            if (key := costs_key(entry)) not in found["costs"]:
                missing.setdefault(key, entry)
        if missing:
            recipes = "".join(json.dumps(entry.recipe) + "\n" for entry in missing.values())
            plugin = plugin_of(list(missing.values()))
            with self._busy(jobs - 1), self._measurer(*plugin, stdin=subprocess.PIPE) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                process.stdin.write(recipes)
                process.stdin.close()
                measured = process.stdout.readline()
                if measured:
                    here = json.loads(measured)
                    kept = found.setdefault("yardstick_seconds", here)
                    if not 1 / _OTHER_SPEED < here / kept < _OTHER_SPEED:
                        line.note(
                            f"{self.costs} is of a machine of another speed (its fixed piece of work took {kept:.3f} "
                            f"CPU-seconds, here {here:.3f}): costs that are measured now, and rows, may not compare "
                            "with those; without that file everything is measured here"
                        )
                for number, (key, text) in enumerate(zip(missing, process.stdout, strict=False), 1):
                    found["costs"][key] = {"name": missing[key].name, "stages": json.loads(text)}
                    write_file_atomically(self.costs, (json.dumps(found, indent=1) + "\n").encode())
                    line.count("costs of a step", number, len(missing), "trainings")
            if process.returncode or not missing.keys() <= found["costs"].keys():
                raise TrainingError("the costs of a step could not be measured", hint="see the message above")
        seconds = found["yardstick_seconds"]
        costs = [found["costs"][costs_key(entry)]["stages"] for entry in wanted]
        return [
            dataclasses.replace(entry, recipe=step_cost.with_steps(entry.recipe, of_stages, seconds))
            for entry, of_stages in zip(wanted, costs, strict=True)
        ]

    @contextlib.contextmanager
    def _busy(self, count: int) -> Iterator[None]:
        """So many processes that work as trainings would."""
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                process = stack.enter_context(self._measurer("busy"))
                stack.callback(process.kill)
                assert process.stdout is not None
                process.stdout.readline()
            yield

    def _measurer(self, *words: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """The program that measures costs, with one thread."""
        return subprocess.Popen(
            [sys.executable, "-P", str(Path(step_cost.__file__)), *words],
            cwd=self.out,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=stdin,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=processes.bound_to(os.getpid()),
        )

    def _read_costs(self, line: ProgressLine) -> dict[str, Any]:
        """What earlier calls measured, on this machine or another: costs are in units of a fixed piece of work."""
        nothing: dict[str, Any] = {"machine": machine(), "costs": {}}
        try:
            found = json.loads(self.costs.read_text())
            seconds = found["yardstick_seconds"]
            if not (isinstance(found["costs"], dict) and isinstance(seconds, int | float) and seconds > 0):
                return nothing
        except (OSError, ValueError, TypeError, KeyError):
            return nothing
        if found.get("machine") != nothing["machine"]:
            line.note(
                f"{self.costs} is of another machine or version ({found.get('machine')}, here {nothing['machine']}): "
                "its costs are used, and rows compare; remove it to measure everything here"
            )
        return dict(found)

    def _train_all(self, wanted: list[Entry], data: dict[str, str], jobs: int, line: ProgressLine) -> list[int]:
        """Exit codes of all trainings. Who is asked to leave asks the trainings in work to save and leave.

        data: task -> identity of its data set.
        """
        pool = ThreadPoolExecutor(jobs)
        before = signal.signal(signal.SIGTERM, _leave)
        try:
            return list(pool.map(lambda entry: self._finish(entry, data, line), wanted))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(self._working):
                process.terminate()
            raise
        finally:
            pool.shutdown()
            signal.signal(signal.SIGTERM, before)

    def _finish(self, entry: Entry, data: dict[str, str], line: ProgressLine) -> int:
        """Train and keep the rows at once, unless they are there; returns an exit code.

        Rows of a finished training are all that its table needs: runs/ may be gone, and on another machine of the same
        kind a benchmark goes on from costs.json and results/ alone.
        """
        if self.kept_rows(entry, data) is not None:
            return 0
        code = self._train(entry, line)
        if not code:
            with self._measuring:
                rows = self._rows(entry)
            kept = {
                "recipe": _former_names(dump(entry.recipe)),
                "learned": _learned(entry),
                "data": _only(data, entry.tasks),
                "rows": rows,
            }
            write_file_atomically(self._result_of(entry), (json.dumps(to_json(kept), indent=1) + "\n").encode())
        return code

    def kept_rows(self, entry: Entry, data: dict[str, str]) -> list[dict[str, Any]] | None:
        """Rows of an earlier call, by the same recipe with the same defaults on the same data."""
        try:
            found = from_json(json.loads(self._result_of(entry).read_text()))
            same = found["recipe"] == _former_names(dump(entry.recipe)) and found["data"] == _only(data, entry.tasks)
            return list(found["rows"]) if same and _agree(found.get("learned"), _learned(entry)) else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def _result_of(self, entry: Entry) -> Path:
        return self.out / "results" / f"{entry.name}.json"

    def _train(self, entry: Entry, line: ProgressLine) -> int:
        """Train one entry unless it is finished; returns the exit code of `ups train`."""
        recipe = self.out / "recipes" / f"{entry.name}.yaml"
        text = dump(entry.recipe)
        if self._bundle(entry).is_dir() and recipe.is_file():
            trained_with = read_run_recipe(self._bundle(entry)).recipe
            if _former_names(recipe.read_text()) == _former_names(text) and _agree(
                _plain(trained_with), _learned(entry)
            ):
                return 0
            # Kept as it is: the next call must not take the old run for one of this recipe.
            line.note(
                f"{entry.name} was trained by another recipe, or with other defaults: "
                f"remove runs/{entry.name} to train it again"
            )
            return ConfigError.exit_code
        recipe.write_text(text)
        log = self.out / "logs" / f"{entry.name}.log"
        line.note(f"training {entry.name}, log {log}")
        command = processes.module_command("ups", "train", str(recipe), *plugin_of([entry]))
        with log.open("ab") as file:
            process = subprocess.Popen(
                command,
                cwd=self.out,
                env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C reaches it once, through us
                preexec_fn=processes.bound_to(os.getpid()),
            )
            self._working.add(process)
            code = process.wait()
            self._working.discard(process)
        line.note(f"{entry.name} is trained" if not code else f"{entry.name} failed with exit code {code}, see {log}")
        return code

    def _bundle(self, entry: Entry) -> Path:
        return self.out / "runs" / entry.name / "bundle"

    def _rows(self, entry: Entry) -> list[dict[str, Any]]:
        from benchmarks.protocol.sharing import count_parameters
        from ups.inference.bundle import load_bundle
        from ups.inference.stored_scores import MODEL
        from ups.models.multiscale import MultiscaleNetwork
        from ups.record.checkpoints import latest_verified, read_progress

        bundle = load_bundle(self._bundle(entry))
        run_dir = self.out / "runs" / entry.name
        checkpoint = latest_verified(run_dir)
        if checkpoint is None:
            raise DataError(f"run {entry.name} has lost its checkpoint", hint=f"remove runs/{entry.name} and go on")
        progress = read_progress(checkpoint)["progress"]
        last, used = float(progress["budget_used_seconds"]), float(progress.get("earlier_seconds", 0.0))
        windows = sum(task["batch_size"] for task in entry.recipe["data"]["tasks"])
        network, budget = bundle.stepper.network, self.cpu_seconds * len(entry.tasks)
        more = {
            "seed": entry.seed,
            "parameters": sum(p.numel() for p in bundle.stepper.parameters()),
            "steps": int(progress["step"]),
            "cpu_seconds": used + last,
            "budget_fraction": (used + last) / budget,
            "windows_per_second": windows / self._seconds_of_last_stage(entry),
            "memory_mib": peak_memory(run_dir),
            "recipe": bundle.info.provenance["recipe"],
        }
        counts = {}
        if isinstance(network, MultiscaleNetwork) and len(entry.tasks) > 1:  # a model of one task shares nothing
            counts = count_parameters(network, bundle.stepper.tasks)
        second = self._second_scores(entry)
        found = []
        for task in entry.tasks:
            sticks = rollout_sticks(bundle.stepper, self.data / f"{task}.zarr", task)
            own = dict(more, rollout_ms=1e3 * sticks * self._yardstick_seconds(), second_scores=second[task])
            if task in counts:
                active, shared = counts[task]
                own |= {"active_parameters": active, "shared_fraction": shared / active}
            found.append(row(entry.model, task, bundle.info.scores[task]["predictors"][MODEL], **own))
        return found

    def _second_scores(self, entry: Entry) -> dict[str, dict[str, float]]:
        """task -> scores on the second test split."""
        from ups.inference.stored_scores import MODEL
        from ups.library.scores import evaluate

        stores = {task: self.second_data / f"{task}.zarr" for task in entry.tasks}
        results = evaluate(self._bundle(entry), data=stores).results
        return {result["task"]: kept_scores(result["predictors"][MODEL]["summary"]) for result in results}

    def _seconds_of_last_stage(self, entry: Entry) -> float:
        """CPU time of one of its steps, on the machine at rest."""
        found = json.loads(self.costs.read_text())
        return float(found["costs"][costs_key(entry)]["stages"][-1]) * self._yardstick_seconds()

    def _yardstick_seconds(self) -> float:
        return float(json.loads(self.costs.read_text())["yardstick_seconds"])

    def _references(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Rows of the predictors that learn nothing, and the identity of each data set."""
        from ups.config.schema import TaskConfig
        from ups.data.open import open_task
        from ups.evaluation.results import task_result
        from ups.evaluation.rollout import RolloutPlan, references
        from ups.run.scoring import rollouts_and_steps

        rows, identities = [], {}
        for task in self.tasks:
            reader = open_task(TaskConfig(name=task, path=str(self.data / f"{task}.zarr")))
            identities[task] = reader.identity()
            if REFERENCE in self.models:
                bar = "training mean" if reader.task.steady else "persistence"
                plan = RolloutPlan.whole(reader, 1, split="test")
                scores = rollouts_and_steps(references(reader, plan), reader, plan, "test")
                result = task_result(reader, plan, "test", scores[0], bar, scores[1])
                rows.append(row(REFERENCE, task, result["predictors"][bar]["summary"], predictor=bar))
            reader.close()
        return rows, identities


def costs_key(entry: Entry) -> str:
    """A hash of all in a recipe that its costs depend on, defaults of the network included: not of how long it trains,
    and where."""
    kept = {key: value for key, value in entry.recipe.items() if key != "run"}
    settings = Recipe.model_validate(entry.recipe).model.model_dump(mode="json")
    kept["model"] = {name: value for name, value in settings.items() if value}  # a later setting is off by default
    ends = ("budget_seconds", "steps")
    kept["stages"] = [{k: v for k, v in stage.items() if k not in ends} for stage in kept["stages"]]
    return hashlib.sha256(_former_names(json.dumps(kept, sort_keys=True)).encode()).hexdigest()


def _learned(entry: Entry) -> dict[str, Any]:
    """All that a recipe decides, with the defaults that it does not say: another default is another model."""
    return _plain(Recipe.model_validate(entry.recipe))


def _plain(recipe: Recipe) -> dict[str, Any]:
    """What a recipe learns, as JSON would give it back."""
    plain: dict[str, Any] = json.loads(_former_names(json.dumps(learned(recipe))))
    return plain


def _former_names(text: str) -> str:
    """A recipe under the names of version 0.1: results and costs of that version are kept under them."""
    return text.replace("batch_size", "block_size")


def _agree(kept: Any, now: Any) -> bool:
    """Whether all that was kept is still so, and what there was not yet is as it was then."""
    if isinstance(kept, dict) and isinstance(now, dict):
        added = any(value and value != _BEFORE.get(key) for key, value in now.items() if key not in kept)
        return not added and all(key in now and _agree(value, now[key]) for key, value in kept.items())
    if isinstance(kept, list) and isinstance(now, list):
        return len(kept) == len(now) and all(map(_agree, kept, now))
    return bool(kept == now)


def _only(data: dict[str, str], tasks: tuple[str, ...]) -> dict[str, str]:
    return {task: data[task] for task in tasks}


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(exit_code_of_signal(number))
