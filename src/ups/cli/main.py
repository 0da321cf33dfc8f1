"""The `ups` command: finds the module of a command, runs it, and turns what goes wrong into a line and an exit code.

To add a command, write `src/ups/cli/NAME.py` with an `app`, and add a row to COMMANDS:

    app = new_app()                                       # from ups.cli.options

    @app.command()
    def train(recipe: RecipeArgument, set: SetOption = [], json: JsonOption = False) -> None:
        '''One sentence for `ups train --help`.'''
        from ups.config.recipe import resolve             # anything slow is imported inside the command
        ...

One `@app.command()` makes `ups train`; several make a group (`ups data generate`, `ups data inspect`). A command prints
with `ups.cli.output`, raises `ups.errors` classes, offers `--json` if it reports something, and leaves with `raise
typer.Exit(code)` if the code is not 0. `ups --help` imports none of them.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

import ups
from ups.cli import output
from ups.cli.options import new_app
from ups.errors import EXIT_CODES, MachineError, UpsError, exit_code_of_signal
from ups.record.files import NOT_ALLOWED, not_allowed
from ups.record.log import show_log


def show_version(*, verbose: bool, as_json: bool) -> None:
    """Print the version; `verbose` adds Python, the core libraries, the extras and the parts."""
    from ups.run.software import describe, parts

    facts: dict[str, Any] = describe() | {"parts": parts()} if verbose else {"ups": ups.__version__}
    if as_json:
        output.report(facts)
        return
    if not verbose:
        output.say(f"ups {ups.__version__}")
        return
    rows, missing = [], [name for name, extra in facts["extras"].items() if extra["missing"]]
    for name, extra in facts["extras"].items():
        more = f" (needs {', '.join(extra['missing'])})" if extra["missing"] else ""
        rows.append((name, "missing" if extra["missing"] else "installed", f"{extra['adds']}{more}"))
    libraries = [(name, version or "not installed") for name, version in facts["libraries"].items()]
    output.say(f"{output.styled('ups', 'bold')} {facts['ups']}\n\n{output.table(libraries)}\n")
    output.say(
        f"{output.styled('Extras', 'bold')}\n{output.table(rows) if rows else '  (the package metadata lists none)'}\n"
    )
    output.say(f"{output.styled('Parts', 'bold')}\n{output.table(_part_rows(facts['parts']))}")
    if missing:
        output.say(f"\nAdd one in the checkout: pip install '.[{missing[0]}]'")


def _part_rows(parts: list[dict[str, str]]) -> list[tuple[str, ...]]:
    """A row for each kind and package; a part that cannot be used has its own, with the reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    broken: list[tuple[str, ...]] = []
    for part in parts:
        package = f"{part['distribution']} {part['version']}"
        if "error" in part:
            broken.append((part["kind"], package, f"{part['name']}: {part['error']}"))
        else:
            groups.setdefault((part["kind"], package), []).append(part["name"])
    return [*((*group, ", ".join(names)) for group, names in groups.items()), *broken]


INTERRUPTED = exit_code_of_signal(signal.SIGINT)


class Command(NamedTuple):
    """A row of the table: what is typed, where it lives, what it does, and what a user who looks for it wants."""

    name: str
    module: str
    help: str
    group: str

    def app(self) -> typer.Typer:
        """Its application: `MODULE:NAME`, or `app` of MODULE. Imports the module."""
        module, _, name = self.module.partition(":")
        app: typer.Typer = getattr(importlib.import_module(module), name or "app")
        return app


START = "Look around"
PREPARE = "Get ready"
RUN = "Train"
LOOK = "Know what happened"
USE = "Use the result"

COMMANDS = (
    Command("demo", "ups.cli.rollout:demo_app", "a film by the model that comes with the package", START),
    Command("models", "ups.cli.models", "the models that come with the package, and their scores", START),
    Command("config", "ups.cli.config", "show, check or compare recipes; schema for editors", PREPARE),
    Command("data", "ups.cli.data", "generate, import, inspect, validate, pack or cache data", PREPARE),
    Command("init", "ups.cli.config:init_app", "a recipe and a description for data of your own", PREPARE),
    Command("doctor", "ups.cli.doctor", "probe this machine, with your recipe", PREPARE),
    Command("plan", "ups.cli.plan", "what a run will need and cost, before it starts", PREPARE),
    Command("run", "ups.cli.train:run_app", "from a recipe to a bundle that has passed its gate", RUN),
    Command("train", "ups.cli.train", "train a recipe, supervised, on one or many ranks", RUN),
    Command("sweep", "ups.cli.train:sweep_app", "a run for each combination of values", RUN),
    Command("launch", "ups.cli.launch", "the same run on a cluster, or on rented machines", RUN),
    Command("finetune", "ups.cli.train:finetune_app", "train a bundle further on your data", RUN),
    Command("reproduce", "ups.cli.train:reproduce_app", "retrain a bundle and compare the two", RUN),
    Command("runs", "ups.cli.runs", "list, promote and clean up runs; a page about all", LOOK),
    Command("status", "ups.cli.runs:status_app", "what a run is doing now", LOOK),
    Command("track", "ups.cli.runs:track_app", "complete the trackers of a run", LOOK),
    Command("why", "ups.cli.runs:why_app", "why a run stopped: rank, place, cause, what to do", LOOK),
    Command("eval", "ups.cli.eval", "score a model and its references", USE),
    Command("compare", "ups.cli.eval:compare_app", "several runs side by side", USE),
    Command("bench", "ups.cli.bench", "a model beside FNO and U-Net, at equal CPU time", USE),
    Command("calibrate", "ups.cli.eval:calibrate_app", "measure how wrong a bundle may be, for error bars", USE),
    Command("rollout", "ups.cli.rollout", "simulate with a bundle", USE),
    Command("serve", "ups.cli.serve", "simulators over HTTP, with shared batches", USE),
    Command("export", "ups.cli.eval:export_app", "write a bundle for other programs", USE),
    Command("hub", "ups.cli.hub", "push, pull and sign bundles on the Hugging Face Hub", USE),
)


def available() -> dict[str, Command]:
    """The commands by name, in the order of the table."""
    return {row.name: row for row in COMMANDS}


class LazyGroup(TyperGroup):
    """The root of the commands: knows the table, and imports a command's module when that command is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of the commands, in the order of the table."""
        return list(available())

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command itself; imports its module."""
        row = available().get(cmd_name)
        if row is None:
            return None
        command = typer.main.get_command(row.app())
        command.name = row.name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; a slip of the finger gets the nearest name."""
        if args and args[0] not in available():
            from difflib import get_close_matches

            close = get_close_matches(args[0], available(), n=1)
            ctx.fail(f"no such command '{args[0]}'" + (f"; did you mean '{close[0]}'?" if close else ""))
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the table as help, without importing a command."""
        formatter.write(output.shown(help_text()))


def help_text() -> str:
    """What `ups --help` prints: commands grouped by what a user wants to do, options, exit codes."""
    rows = list(available().values())
    width = max(len(row.name) for row in rows)
    parts = [
        f"{output.styled('ups', 'bold')}: train one neural simulator for many PDEs, and always know why a run stopped.",
        f"{output.styled('Usage:', 'bold')} ups COMMAND [ARGUMENTS]     ups COMMAND --help says more",
    ]
    for group in dict.fromkeys(row.group for row in rows):
        lines = [f"  {output.styled(row.name.ljust(width), 'cyan')}   {row.help}" for row in rows if row.group == group]
        parts.append("\n".join([output.styled(group, "bold"), *lines]))
    options = [
        ("-h, --help", "show this"),
        ("--version", "show the version; --verbose adds libraries and what each extra brings"),
        ("--install-completion", "complete commands and options with the tab key in this shell"),
    ]
    parts.append(f"{output.styled('Options', 'bold')}\n{output.table(options, gap=3)}")
    codes = [(str(code).rjust(3), meaning) for code, meaning in EXIT_CODES.items()]
    parts.append(f"{output.styled('Exit codes', 'bold')}\n{output.table(codes)}")
    log = output.log_path()
    home = os.path.expanduser("~")
    folder = f"~{str(log)[len(home) :]}" if home != "/" and str(log).startswith(home + "/") else str(log)
    tracebacks = f"Tracebacks are kept in {folder}." if log else "Set XDG_STATE_HOME to keep tracebacks."
    parts.append(f"{tracebacks} NO_COLOR=1 turns colors off.")
    return "\n\n".join(parts) + "\n"


app = new_app(completion=True)


@app.callback(cls=LazyGroup, invoke_without_command=True, no_args_is_help=False)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="With --version: everything a bug report needs.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --version: as JSON.")] = False,
) -> None:
    if version:
        show_version(verbose=verbose, as_json=json)
    elif context.invoked_subcommand is None:
        output.say(help_text().rstrip("\n"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `ups` command; always ends in SystemExit with a code of `ups.errors.EXIT_CODES`."""
    output.open_closed_streams()
    os.environ["PYTHONSAFEPATH"] = "1"  # of all children: no start of Python imports from the current directory
    show_log(output.note_message)
    sys.exit(run(sys.argv[1:] if arguments is None else list(arguments)))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code; nothing is raised for a user's mistake."""
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="ups", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except UpsError as error:
        return _known(error, arguments)
    except BrokenPipeError:
        return _leave_pipe()
    except (KeyboardInterrupt, typer.Abort):
        return _quietly(lambda: output.note("interrupted"), INTERRUPTED)
    except SystemExit as error:
        # typer turns a broken pipe into exit code 1; ours has a code of its own.
        if isinstance(error.__context__, BrokenPipeError):
            return _leave_pipe()
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except Exception as error:  # noqa: BLE001 - the last handler of the process: keeps the traceback, sets the code
        if isinstance(error, OSError) and error.errno in NOT_ALLOWED and error.filename is not None:
            return _known(not_allowed(error), arguments)
        if isinstance(error, MemoryError):
            words = "this process got no more memory from the system"
            return _known(MachineError(words, hint="raise its limit (ulimit -v, or that of the container)"), arguments)
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _wrong_use(error)
        return _unexpected(error, arguments)
    if code == INTERRUPTED:
        return _quietly(lambda: output.note("interrupted"), INTERRUPTED)
    return code if isinstance(code, int) else 0


def _command_of(arguments: list[str]) -> str:
    """The command's name for the log; never its arguments, which may hold what should not be in a file."""
    return arguments[0] if arguments and arguments[0] in available() else "-"


def _known(error: UpsError, arguments: list[str]) -> int:
    output.keep_traceback(error, _command_of(arguments))
    return _quietly(lambda: output.print_error(error, as_json="--json" in arguments), error.exit_code)


def _wrong_use(error: Any) -> int:
    """Unknown command or option, missing argument: what is wrong, and where the help is."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "ups"
    text = message = str(error.format_message())
    if type(error).__name__ != "NoArgsIsHelpError":  # its message is the help of the group
        head = output.styled("error:", "bold", "red", stream=sys.stderr)
        text = f"{head} usage: {' '.join(message.split()).rstrip('.')} -> {path} --help"
    return _quietly(lambda: output.note(text), int(error.exit_code))


def _unexpected(error: Exception, arguments: list[str]) -> int:
    import traceback

    path = output.keep_traceback(error, _command_of(arguments))
    copy = f"; also kept in {path}" if path else ""
    head = output.styled("error:", "bold", "red", stream=sys.stderr)

    def print_last() -> None:
        output.note("".join(traceback.format_exception(error)).rstrip("\n"))
        output.note(
            f"{head} unexpected {type(error).__name__}: a bug in ups or in your own code (traceback above{copy})"
        )

    return _quietly(print_last, 1)


def _quietly(print_last: Callable[[], None], code: int) -> int:
    """Say something on the way out; output that cannot be written does not change the exit code."""
    try:
        print_last()
    except (OSError, UpsError):
        output.silence(sys.stdout, sys.stderr)
    return code


def _leave_pipe() -> int:
    output.silence(sys.stdout, sys.stderr)
    return exit_code_of_signal(signal.SIGPIPE)


if __name__ == "__main__":
    main()
