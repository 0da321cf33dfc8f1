"""What launchers share: a job on a rented machine that starts empty and disappears, and scripts in `RUN/launch`.

Pieces of bash that the launchers of clouds put together: what the machine installs, fetches, runs and leaves in a
bucket. What a machine costs and how it is torn down is for them. The machine gets the resolved recipe as text, with
references in place of secrets.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ups.buckets.client import holds_secret
from ups.config.schema import Recipe
from ups.errors import ConfigError, MachineError
from ups.record.files import machine_errors, write_file_atomically
from ups.record.run_dir import RunDir
from ups.record.text import printable

# Below the home directory: recipe, environment, data and run.
PLACE = "ups-launch"
RECIPE_NAME = "recipe.yaml"
# As `requires-python` in pyproject.toml; images may have an older one.
OLDEST_PYTHON = (3, 11)
# Before the end of the last hour: ranks save, and results go into the bucket.
LEAVING_SECONDS = 600
# From SIGTERM to SIGKILL: ranks finish their step, save, and the copy of that goes into the bucket.
KILL_SECONDS = 300
# A run that could not do more than start is not started.
MIN_SECONDS = 60
_INSTALL_SECONDS = 3600
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()=+@-]+)*/?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_REFERENCE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]{0,127})\}")
_SECRET_WORDS = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)
_GPUS = re.compile(r"[A-Za-z][A-Za-z0-9._-]*:[1-9][0-9]?")
_WHEEL_AT_END = re.compile(r"([^/\s]+\.whl)([?#]\S*)?$")
# NAME-VERSION[-BUILD]-PYTHON-ABI-PLATFORM: pip reads what it installs from the name alone.
_WHEEL_NAME = re.compile(r"[^-]+-[^-]+(-\d[^-]*)?-[^-]+-[^-]+-[^-]+\.whl")


@dataclass(frozen=True)
class RentedJob:
    """What is done on the machine.

    recipe: the resolved recipe as text. install: what pip installs, with ups in it. mirror: where checkpoints are
    copied, s3://BUCKET/PREFIX. data: PATH=URL, a path of the recipe and the bucket that holds it. secrets: names of
    variables whose values only the provider knows. max_price: of all hosts, in dollars an hour. started: seconds of the
    launch since 1970; max_hours count from there, whatever waits or is lost on the way.
    """

    name: str
    recipe: str
    install: str
    max_price: float
    max_hours: float
    started: float
    mirror: str = ""
    data: Sequence[str] = ()
    secrets: Sequence[str] = ()
    variables: Sequence[str] = ()
    ranks: int = 1
    fetched: Sequence[tuple[str, str]] = field(init=False, default=())

    def __post_init__(self) -> None:
        limits = ((self.max_price, "--max-price", "dollars"), (self.max_hours, "--max-hours", "hours"))
        for limit, option, unit in limits:
            if not (math.isfinite(limit) and limit > 0):
                raise ConfigError(f"{option} {limit} is no limit", hint=f"a number of {unit} above 0")
        if not self.install.strip() or not self.install.isprintable() or self.install.startswith("-"):
            raise ConfigError(f"--install '{self.install}' is nothing that pip installs")
        for option, text in (("--install", self.install), ("--mirror", self.mirror), ("--data", " ".join(self.data))):
            if holds_secret(text):
                raise ConfigError(
                    f"{option} names a user, a query or a token in an address, and would be written into a script",
                    hint="use an address that needs none, or an image that has ups in it",
                )
        wheel = _WHEEL_AT_END.search(self.install)
        if self.install.startswith((".", "/", "~")) or (wheel and "://" not in self.install):
            raise ConfigError(
                f"--install '{self.install}' is a file of this host, which the machine does not see",
                hint="an address of it (https://...), or of a repository (git+https://...)",
            )
        if wheel and not _WHEEL_NAME.fullmatch(wheel[1]):
            raise ConfigError(
                f"--install: '{wheel[1]}' is no name of a wheel, and pip would refuse it on the machine",
                hint="keep the name that `pip wheel` gave it, such as universal_simulator-1.0-py3-none-any.whl",
            )
        check_word("--mirror", self.mirror, _BUCKET, "s3://bucket/prefix")
        object.__setattr__(self, "fetched", [_path_and_bucket(one) for one in self.data])
        for name in self.secrets:
            check_word("--secret", name, _VARIABLE, "AWS_SECRET_ACCESS_KEY, only the name: the value stays")
        plain_variables(self.variables)

    @property
    def deadline(self) -> int:
        """When the machine must be gone, in seconds since 1970."""
        return math.ceil(self.started + self.max_hours * 3600)

    @property
    def stop_at(self) -> int:
        """When the run is asked to save and leave."""
        return math.ceil(self.deadline - min(LEAVING_SECONDS, self.max_hours * 3600 / 4))

    @property
    def install_seconds(self) -> int:
        """For each of the two installs; together they end within the hours."""
        return math.ceil(min(_INSTALL_SECONDS, self.max_hours * 1800))

    @property
    def run_dir(self) -> str:
        """Relative to where the run is started."""
        return f"runs/{self.name}"

    @property
    def results(self) -> str:
        """Where everything of the run directory but its checkpoints goes; next to the mirror, which owns its prefix."""
        return f"{self.mirror.rstrip('/')}-results" if self.mirror else ""

    @property
    def needs_bucket(self) -> bool:
        return bool(self.mirror or self.fetched)


def check_word(option: str, word: str, pattern: re.Pattern[str], example: str) -> None:
    """Raise ConfigError for the value of an option that does not fit; an empty one was not given."""
    if word and not pattern.fullmatch(word):
        raise ConfigError(f"{option} '{printable(word)}' is not valid", hint=f"such as {example}")


def num_gpus(text: str) -> int:
    """How many GPUs KIND:COUNT are, and 0 for an empty text. Raises ConfigError."""
    check_word("--gpus", text, _GPUS, "A100:8 (KIND:COUNT)")
    return int(text.partition(":")[2] or 0)


def secret_names(recipe: str, names: Sequence[str]) -> list[str]:
    """The names of all secrets: those that the recipe refers to, and those that were given."""
    return sorted({*_REFERENCE.findall(recipe), *names})


def plain_variables(texts: Sequence[str]) -> dict[str, str]:
    """Variables by name, of NAME=VALUE. Raises ConfigError for what looks like a secret, and then shows no value."""
    variables = {}
    for one in texts:
        name, equals, value = one.partition("=")
        if _SECRET_WORDS.search(name) or holds_secret(value):
            raise ConfigError(
                f"--env '{printable(name)}' looks like a secret, which would be written down",
                hint="--secret passes a secret by its name, without the value",
            )
        if not (_VARIABLE.fullmatch(name) and equals and value.isprintable()):
            raise ConfigError(f"--env '{printable(one)}' is not NAME=VALUE", hint="such as NCCL_P2P_DISABLE=1")
        variables[name] = value
    return variables


def require_data(recipe: Recipe, fetched: Sequence[str]) -> None:
    """Raise ConfigError for a task whose data would not be on an empty machine."""
    there = [one.partition("=")[0].rstrip("/") for one in fetched]
    for task in recipe.data.tasks:
        if task.source is not None and task.source.type != "import":
            continue
        for path in [task.path] if isinstance(task.path, str) else task.path:
            if not any(path == known or path.startswith(f"{known}/") for known in there):
                raise ConfigError(
                    f"the data of task '{task.name}' ({path}) would not be on the machine, which begins empty",
                    hint=f"give it a source that is generated or fetched, or --data {path}=s3://bucket/...",
                )


def setup(machine: RentedJob) -> list[str]:
    """Lines of bash: environment, recipe. They end with the shell in the place, and leave with 5 if something fails."""
    limit, version = f"timeout {machine.install_seconds}", ".".join(map(str, OLDEST_PYTHON))
    lines = [
        "set -u",
        f'mkdir -p "$HOME/{PLACE}" && cd "$HOME/{PLACE}" || exit 5',
        f"if python3 -c 'import sys; sys.exit(sys.version_info < {OLDEST_PYTHON})'; then",
        # The torch of the image is used where there is one; an image without venv is installed into.
        "  python3 -m venv --system-site-packages env || true",
        "else",
        f"  command -v uv >/dev/null || {limit} python3 -m pip install --quiet --target uvp uv",
        f'  PATH="$PATH:$PWD/uvp/bin" {limit} uv venv --quiet --seed --python {version} env || exit 5',
        "fi",
        *enter(machine),
        f"{limit} python3 -m pip install --quiet {shlex.quote(machine.install)} || exit 5",
    ]
    if machine.needs_bucket:
        # Apart from the rest, since it pins the versions of its own libraries.
        lines += [f"{limit} python3 -m pip install --quiet --target aws-cli awscli || exit 5"]
    end = "END_OF_RECIPE"
    if end in machine.recipe.split("\n"):
        raise ConfigError(f"the recipe has a line '{end}', which ends it in a script")
    return [*lines, f"cat > {RECIPE_NAME} <<'{end}'", machine.recipe.rstrip("\n"), end]


def enter(machine: RentedJob) -> list[str]:
    """Lines of bash: into the place and its environment, for a shell that comes after the one of the setup."""
    return [
        f'cd "$HOME/{PLACE}" || exit 5',
        "if [ -f env/bin/activate ]; then . env/bin/activate; else export PIP_BREAK_SYSTEM_PACKAGES=1; fi",
        "export PYTHONSAFEPATH=1",  # data that is fetched lies in the current directory
        # Nothing here outlives the hours, a copy that hangs included.
        "left_until() { echo $(($1 - $(date +%s))); }",
        f's3() {{ PYTHONPATH="$HOME/{PLACE}/aws-cli" timeout "$(left_until {machine.deadline})" '
        'python3 -m awscli s3 "$@" --only-show-errors; }',
    ]


def fetch(machine: RentedJob) -> list[str]:
    """Lines of bash: data out of buckets. An address that ends in / is a prefix, any other is an object."""
    return [
        f"s3 {'sync' if url.endswith('/') else 'cp'} {shlex.quote(url)} {shlex.quote(path)} || exit 5"
        for path, url in machine.fetched
    ]


def run(machine: RentedJob, words: str) -> list[str]:
    """Lines of bash that run `words` until the time is up; `code` is what came out.

    SIGTERM goes to the supervisor alone, which makes all ranks save.
    """
    return [
        f"left=$(left_until {machine.stop_at})",
        f'if [ "$left" -lt {min(MIN_SECONDS, math.floor(machine.max_hours * 900))} ]; then',
        '  echo "the hours are over before the run was started" >&2; code=143',
        "else",
        f'  timeout --foreground --preserve-status --signal=TERM --kill-after={KILL_SECONDS} "$left" {words}',
        "  code=$?",
        "fi",
    ]


def leave_results(machine: RentedJob) -> list[str]:
    """Lines of bash: all of the run directory but its checkpoints into the bucket; `kept` says whether that worked."""
    if not machine.results:
        return ["kept=no"]
    names = f"{shlex.quote(machine.run_dir)} {shlex.quote(machine.results)}"
    return [f"if s3 sync {names} --exclude 'checkpoints/*'; then kept=yes; else kept=no; fi"]


def changes(machine: RentedJob) -> list[str]:
    """Words behind the command: where the run lies there, and where its checkpoints are copied."""
    settings = [f"run.dir={machine.run_dir}"]
    if machine.mirror:
        settings.append(f"checkpoint.mirror={machine.mirror}")
    return [word for change in settings for word in ("--set", change)]


def _path_and_bucket(text: str) -> tuple[str, str]:
    path, _, url = text.partition("=")
    if not path or path.startswith(("/", "-", "~")) or ".." in path.split("/") or not path.isprintable():
        raise ConfigError(f"--data '{text}' names no path below the place of the run", hint="PATH=s3://bucket/...")
    if not _BUCKET.fullmatch(url):
        raise ConfigError(f"--data '{text}' names no bucket", hint="such as data/waves.zarr=s3://bucket/waves.zarr/")
    return path, url


# What launchers leave in RUN/launch; anything else in it belongs to the user.
NAMES = re.compile(r"job\.sh|slurm_\d+(_\d+)?\.out|skypilot\.yaml|vast\.sh|vast_\d+\.log")


def write_script(run_dir: Path, name: str, text: str) -> Path:
    """Write one of the files anew; returns its path. Raises MachineError."""
    path = RunDir(run_dir).launch / name
    with machine_errors(f"cannot write to {path.parent}"):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_file_atomically(path, text.encode())
    return path


def hand_in(program: Sequence[str], scheduler: str, path: Path, hint: str, seconds: float) -> str:
    """Run the program that takes a script, at `path`; returns what it printed. Raises MachineError."""
    try:
        done = subprocess.run(
            program, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise MachineError(
            f"{scheduler} has not answered for {seconds:.0f} s; the job may have been handed in", hint=hint
        ) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[-500:] or f"exit code {done.returncode}"
        raise MachineError(f"{scheduler} refuses the job: {said}", hint=f"the script is {path}")
    return done.stdout.strip()


def require_program(program: str, hint: str) -> None:
    """Raise MachineError if a program is missing that a launcher calls."""
    if shutil.which(program) is None:
        raise MachineError(f"there is no `{program}` here", hint=f"{hint}; --dry-run shows what would be sent")
