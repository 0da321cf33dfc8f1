"""Trainings for comparisons: each in a process of its own, without a run directory; what is finished is not repeated.

No program of its own: `ablations.py`, `corrector.py`, `steady.py` and others name the jobs and read the results. A
result is one JSON file with the scores on the valid split (and on the test split if asked), the CPU-seconds really
used, and the recipe.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for benchmarks.protocol

Recipe = dict[str, Any]
Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One training. trajectories: how many of a split are scored. costs: where the costs of a step are kept, and cost:
    their name, which jobs of equal costs share. start: bundle whose weights it starts from. keep: where its bundle
    goes. test: also score the test split. part: of `other_parts`, in place of the network's own."""

    title: str
    result: Path
    recipe: Recipe
    trajectories: int
    costs: Path
    cost: str
    start: Path | None = None
    keep: Path | None = None
    test: bool = False
    part: str = ""

    def finished(self) -> Result | None:
        """What an earlier call left. A result of another recipe is no result of this one, and ends the program."""
        if not self.result.is_file():
            return None
        found: Result = json.loads(self.result.read_text())
        same = found["recipe"] == json.loads(json.dumps(self.recipe))
        if not same or found.get("defaults", "") != defaults_of(self.recipe):
            sys.exit(
                f"{self.result} was made by another recipe, or with other defaults: remove it, or choose another place"
            )
        return found


def defaults_of(recipe: Recipe) -> str:
    """A hash of all that a recipe decides with the defaults that it does not say: another default is another model."""
    from ups.config.identity import learned
    from ups.config.schema import Recipe as Checked

    return hashlib.sha256(json.dumps(learned(Checked.model_validate(recipe)), sort_keys=True).encode()).hexdigest()


def with_steps(recipe: Recipe, place: Path, name: str) -> Recipe:
    """The recipe with numbers of steps in place of CPU-seconds (`benchmarks.protocol.step_cost`).

    A cost is measured once for each name, and the yardstick once for all, in this process, which has one thread.
    """
    from benchmarks.protocol import step_cost

    def measured() -> list[float]:
        return step_cost.middle([step_cost.step_costs(recipe) for _ in range(step_cost.ROUNDS)])

    costs = _kept(place / f"{file_name(name)}.json", measured)
    return step_cost.with_steps(recipe, costs, _kept(place / "yardstick.json", step_cost.yardstick_seconds))


def file_name(text: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in text)


def _kept(file: Path, measure: Callable[[], Any]) -> Any:
    """What stands in a file, or is measured and put there. Of jobs that measure at the same time the first counts."""
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        own = file.with_suffix(f".{os.getpid()}")
        own.write_text(json.dumps(measure()))
        with contextlib.suppress(FileExistsError):
            os.link(own, file)
        own.unlink()
    return json.loads(file.read_text())


def run_jobs(jobs: Iterable[Job], at_once: int) -> None:
    """Train what is not finished, so many at the same time. A failure is said and leaves a gap."""

    def run(job: Job) -> None:
        text = json.dumps(asdict(job), default=str)
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        code = subprocess.run([sys.executable, __file__], input=text, text=True, check=False, env=env).returncode
        print(f"{job.title}: {'done' if code == 0 else f'failed with exit code {code}'}", flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, [job for job in jobs if job.finished() is None]))


def train_and_score(
    recipe: Recipe, trajectories: int, *, start: Path | None = None, keep: Path | None = None, test: bool = False
) -> Result:
    """Train in this process and score the end. The last stage's weights are the moving average, if there is one."""
    from ups.config.schema import Recipe as Checked
    from ups.distributed.runtime import Runtime
    from ups.inference.bundle import BundleInfo, load_bundle, write_bundle
    from ups.models.build import build_model
    from ups.models.stepper import Stepper
    from ups.models.transfer import transfer
    from ups.run.assemble import assemble, open_data
    from ups.training.progress import Progress
    from ups.training.stages import Stage

    checked = Checked.model_validate(recipe)
    progress, earlier = Progress(), None
    with Runtime.start(checked.engine) as runtime, open_data(checked) as opened:

        def take(stage: Stage) -> None:
            if earlier is not None:
                stage.stepper.load_state_dict(earlier)
            elif start is not None:
                print(transfer(load_bundle(start).stepper, stage.stepper).describe(), flush=True)

        stepper: Stepper | None = None
        used = 0.0
        while stepper is None or progress.stage_index + 1 < len(checked.stages):
            progress = progress if stepper is None else progress.next_stage()
            with assemble(checked, opened, runtime, progress, change=take) as parts:
                parts.engine.run()
                stepper, progress = parts.stepper, parts.engine.progress
            earlier = {name: value.clone() for name, value in stepper.state_dict().items()}
            used += progress.budget_used_seconds
        stepper.requires_grad_(False).eval()
        if keep is not None:
            # Normalization went through training in the precision of the weights; a bundle has it as it was measured.
            kept = build_model(stepper.configs, stepper.tasks, opened.statistics, stepper.context_frames)
            kept.networks.load_state_dict(stepper.networks.state_dict())
            grids = {reader.task.name: reader.coordinates for reader in opened.readers}
            info = BundleInfo(stepper.configs, stepper.context_frames, stepper.tasks, opened.statistics, grids)
            keep.parent.mkdir(parents=True, exist_ok=True)
            write_bundle(keep, kept, info, config_text=f"run:\n  name: {keep.name}\n", card=f"# {keep.name}\n")
        stepper.network.fix_weights()
        found: Result = {"scores": _scores(stepper, opened.readers, "valid", trajectories)}
        if test:
            found["test_scores"] = _scores(stepper, opened.readers, "test", trajectories)
    return found | {"steps": progress.stage_step, "cpu_seconds": used}


def _scores(stepper: Any, readers: Any, split: str, trajectories: int) -> dict[str, dict[str, float]]:
    """Task -> errors relative to the trajectory of one step and of whole rollouts, and how many blew up."""
    from ups.evaluation.rollout import RolloutPlan, score_task
    from ups.spec.batch import RankInfo

    scores = {}
    for reader in readers:
        plan = RolloutPlan.whole(reader, stepper.context_frames, split=split)
        common: dict[str, Any] = {"split": split, "max_trajectories": trajectories}
        rolled = score_task({"model": stepper}, reader, RankInfo(0, 1), plan, **common)["model"]
        stepped = score_task({"model": stepper}, reader, RankInfo(0, 1), plan, kind="one_step", **common)["model"]
        whole, single = rolled.summary(), stepped.summary()
        scores[reader.task.name] = {
            "one_step": float(single["trmse"]),
            "rollout": float(whole["trmse"]),
            "blown_up": int(whole["num_blown_up"]),
        }
    return scores


def main() -> None:
    """The child: a job from standard input, its result to where it says, in one instant."""
    job = json.load(sys.stdin)
    places = {name: Path(job[name]) if job[name] else None for name in ("start", "keep")}
    if job["part"]:
        import other_parts

        getattr(other_parts, job["part"])()
    recipe = with_steps(job["recipe"], Path(job["costs"]), job["cost"])
    result = train_and_score(recipe, job["trajectories"], test=job["test"], **places)
    target = Path(job["result"])
    target.parent.mkdir(parents=True, exist_ok=True)
    kept = {"title": job["title"], "recipe": job["recipe"], "defaults": defaults_of(job["recipe"])}
    unfinished = target.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(result | kept, indent=1))
    unfinished.replace(target)


if __name__ == "__main__":
    main()
