"""A mistake in a recipe gives one line that names the place, the field, the value and what to do. Never a traceback."""

# ruff: noqa: E501 - the expected line is easiest to compare unbroken

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ups.config.recipe import resolve
from ups.errors import ConfigError

SOUND = """\
run:
  name: demo
data:
  tasks:
    - name: heat
      path: heat.zarr
model:
  width: 32
stages:
  - type: operator
    steps: 10
engine:
  precision: float32
"""


@dataclass(frozen=True)
class Broken:
    """A recipe file `r.yaml`, overrides, and the exact line expected."""

    line: str
    text: str | bytes = SOUND
    overrides: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)


def edited(old: str, new: str) -> str:
    assert old in SOUND
    return SOUND.replace(old, new)


CASES: dict[str, Broken] = {
    "unknown field, nearest name": Broken(
        "config: r.yaml:8: model.widht = 32: no such field in model -> did you mean 'widths'?", edited("width", "widht")
    ),
    "unknown field that lives elsewhere": Broken(
        "config: r.yaml:13: engine.learning_rate = 0.001: no such field in engine -> did you mean stages.0.optim.learning_rate?",
        edited("  precision", "  learning_rate: 1e-3\n  precision"),
    ),
    "unknown field unlike any other": Broken(
        "config: r.yaml:3: run.zzz = 1: no such field in run -> known here: name, dir, seed",
        edited("name: demo", "name: demo\n  zzz: 1"),
    ),
    "unknown section": Broken(
        "config: r.yaml:14: modle = {...}: no such section -> did you mean 'model'?",
        SOUND + "modle:\n  width: 1\n",
    ),
    "text for a number": Broken(
        'config: r.yaml:8: model.width = "wide": expected a whole number -> Channels of a latent token.',
        edited("width: 32", "width: wide"),
    ),
    "quoted number": Broken(
        'config: r.yaml:8: model.width = "32": expected a whole number -> write 32, without quotes',
        edited("width: 32", 'width: "32"'),
    ),
    "fraction for a count": Broken(
        "config: r.yaml:8: model.width = 32.5: expected a whole number -> Channels of a latent token.",
        edited("width: 32", "width: 32.5"),
    ),
    "scientific count": Broken(
        "config: r.yaml:11: stages.0.steps = 10000.0: expected a whole number -> write 10000",
        edited("steps: 10", "steps: 1e4"),
    ),
    "true for a number": Broken(
        "config: r.yaml:11: stages.0.steps = true: expected a whole number -> Optimizer steps; or give budget_seconds.",
        edited("steps: 10", "steps: true"),
    ),
    "yes for true": Broken(
        'config: r.yaml:14: engine.compile = "yes": expected true or false -> write true', SOUND + "  compile: yes\n"
    ),
    "nearly a word next to numbers": Broken(
        "config: r.yaml:14: engine.micro_batch_size = \"aut\": expected a whole number or auto -> did you mean 'auto'?",
        SOUND + "  micro_batch_size: aut\n",
    ),
    "number for text": Broken(
        "config: r.yaml:2: run.name = 2024: expected text -> write '2024', in quotes",
        edited("name: demo", "name: 2024"),
    ),
    "list for a section": Broken(
        "config: r.yaml:7: model = [1 entry]: expected a section (name: value lines) -> remove the '-' before the names",
        edited("  width: 32", "  - width"),
    ),
    "section left empty": Broken(
        "config: r.yaml:7: model = null: expected a section (name: value lines) -> leave the field out to take its default, or give it a value",
        edited("  width: 32\n", ""),
    ),
    "section for a list": Broken(
        "config: r.yaml:4: data.tasks = {...}: expected a list -> start each entry with '- '",
        edited("    - name: heat\n      path: heat.zarr", "    name: heat"),
    ),
    "text or list of text": Broken(
        "config: r.yaml:6: data.tasks.0.path = 7: expected text or a list -> write '7', in quotes",
        edited("heat.zarr", "7"),
    ),
    "entry of the wrong type": Broken(
        "config: r.yaml:6: data.tasks.0.path.1 = 7: expected text -> write '7', in quotes",
        edited("heat.zarr", "[a.h5, 7]"),
    ),
    "not one of the choices": Broken(
        "config: r.yaml:13: engine.precision = \"bf16\": expected one of float32, bfloat16, float64 -> did you mean 'bfloat16'?",
        edited("float32", "bf16"),
    ),
    "near one of the choices": Broken(
        "config: r.yaml:13: engine.precision = \"bfloat_16\": expected one of float32, bfloat16, float64 -> did you mean 'bfloat16'?",
        edited("float32", "bfloat_16"),
    ),
    "unknown stage": Broken(
        "config: r.yaml:10: stages.0.type = \"operater\": expected one of autoencode, corrector, distill, linear, operator, steady -> did you mean 'operator'?",
        edited("type: operator", "type: operater"),
    ),
    "stage without a type": Broken(
        "config: r.yaml:10: stages.0.type: is missing: expected one of autoencode, corrector, distill, linear, operator, steady -> say which kind this is",
        edited("type: operator\n    steps", "steps"),
    ),
    "field of another stage": Broken(
        "config: r.yaml:12: stages.0.refined_weight = 1: no such field in stages.0 -> it belongs to type steady",
        edited("steps: 10", "steps: 10\n    refined_weight: 1"),
    ),
    "below the range": Broken(
        "config: r.yaml:8: model.width = 4: expected at least 8 channels -> Channels of a latent token.",
        edited("width: 32", "width: 4"),
    ),
    "above the range": Broken(
        "config: r.yaml:12: stages.0.optim.learning_rate = 1000.0: expected at most 10 -> Peak learning rate, after warm-up.",
        edited("steps: 10", "steps: 10\n    optim: {learning_rate: 1e3}"),
    ),
    "must be above": Broken(
        "config: r.yaml:7: data.tasks.0.weight = 0: expected above 0 -> Share of this task's blocks when data.mixture is 'weights'.",
        edited("path: heat.zarr", "path: heat.zarr\n      weight: 0"),
    ),
    "not finite": Broken(
        "config: r.yaml:7: data.tasks.0.weight = .nan: expected a finite number -> Share of this task's blocks when data.mixture is 'weights'.",
        edited("path: heat.zarr", "path: heat.zarr\n      weight: .nan"),
    ),
    "overflow": Broken(
        "config: r.yaml:7: 1e999 is too large for a number -> the largest is about 1.8e308",
        edited("path: heat.zarr", "path: heat.zarr\n      weight: 1e999"),
    ),
    "no tasks": Broken(
        "config: r.yaml:4: data.tasks = []: expected at least 1 entry -> The data sources.",
        edited("tasks:\n    - name: heat\n      path: heat.zarr", "tasks: []"),
    ),
    "missing field": Broken(
        "config: r.yaml:1: run.name: is missing -> Name of the run; its directory is runs/<name> unless dir says otherwise.",
        edited("  name: demo", "  seed: 1"),
    ),
    "missing section": Broken(
        "config: r.yaml:1: stages: is missing -> What is trained, in this order.", SOUND[: SOUND.index("stages:")]
    ),
    "bad name": Broken(
        "config: r.yaml:2: run.name = \"../demo\": must start with a letter or digit, then letters, digits, '_', '.', '-' (at most 128) -> Name of the run; its directory is runs/<name> unless dir says otherwise.",
        edited("demo", "../demo"),
    ),
    "inconsistent fields in a section": Broken(
        "config: r.yaml:9: model: num_heads (5) must divide width (32)",
        edited("width: 32", "width: 32\n  num_heads: 5"),
    ),
    "two lengths of a stage": Broken(
        "config: r.yaml:11: stages.0: give either steps or budget_seconds, and not both; null takes one away",
        edited("steps: 10", "steps: 10\n    budget_seconds: 5"),
    ),
    "latent stage without an autoencoder": Broken(
        "config: r.yaml:10: stages.0: 'operator' on latents needs a stage before it that trains them: autoencode",
        edited("steps: 10", "steps: 10\n    space: latent"),
    ),
    "corrector of nothing": Broken(
        "config: r.yaml:10: stages.0: 'corrector' continues from learned weights: put a stage before it, or say with "
        "start_from where they are",
        edited("type: operator", "type: corrector"),
    ),
    "ensemble of a model without noise": Broken(
        "config: r.yaml:10: stages.0: the members of 'corrector' differ by noise, and the model takes none; set "
        "model.noise_size, such as 16 (model.type multiscale)",
        edited("steps: 10", "steps: 10\n    start_from: runs/old\n    kind: ensemble").replace(
            "type: operator", "type: corrector"
        ),
    ),
    "two tasks of one name": Broken(
        "config: r.yaml:4: data: two tasks are called 'heat'; give each its own name",
        edited("path: heat.zarr", "path: a\n    - name: heat\n      path: b"),
    ),
    "duplicate key": Broken(
        "config: r.yaml:14: engine.precision: is set twice (first on line 13) -> keep one of them",
        SOUND + "  precision: float64\n",
    ),
    "duplicate section": Broken(
        "config: r.yaml:14: run: is set twice (first on line 1) -> keep one of them", SOUND + "run:\n  name: again\n"
    ),
    "reference in an ordinary field": Broken(
        "config: r.yaml:6: data.tasks.0: path does not take ${...} references: only fields that hold a secret do",
        edited("heat.zarr", '"${env:DATA}"'),
    ),
    "python tag": Broken(
        "config: r.yaml:2: tag '!!python/object/apply:os.system' is not allowed -> a recipe holds plain values only: remove the tag",
        edited("demo", "!!python/object/apply:os.system [echo hacked]"),
    ),
    "local tag": Broken(
        "config: r.yaml:2: tag '!secret' is not allowed -> a recipe holds plain values only: remove the tag",
        edited("demo", "!secret x"),
    ),
    "undefined tag handle": Broken(
        "config: r.yaml:2: a tag ('!...') is not allowed -> a recipe holds plain values only: remove the tag",
        edited("demo", "!x!y z"),
    ),
    "anchor": Broken(
        "config: r.yaml:6: anchor '&p' is not allowed -> repeat the value, or share it with 'include:'",
        edited("path: heat.zarr", "path: &p heat.zarr"),
    ),
    "alias bomb": Broken(
        "config: r.yaml:1: anchor '&a' is not allowed -> repeat the value, or share it with 'include:'",
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n",
    ),
    "alias of nothing": Broken(
        "config: r.yaml:2: alias '*demo' is not allowed -> repeat the value, or share it with 'include:'",
        edited("demo", "*demo"),
    ),
    "merge key": Broken(
        "config: r.yaml:13: merge key '<<' is not allowed -> share values with 'include:'",
        edited("  precision: float32", "  <<: {precision: float32}"),
    ),
    "deep nesting": Broken(
        "config: r.yaml:1: nested more than 32 levels deep -> no recipe is that deep; check brackets", "[" * 100_000
    ),
    "deep nesting of mappings": Broken(
        "config: r.yaml:34: nested more than 32 levels deep -> no recipe is that deep; check brackets",
        "".join("  " * i + "a:\n" for i in range(200)),
    ),
    "too many values": Broken(
        "config: r.yaml:1: more than 25,000 values -> a recipe is a page of text, not data",
        "a: [" + "1," * 60_000 + "]\n",
    ),
    "ten megabytes": Broken(
        "config: r.yaml: cannot be read: it has 10000002 bytes, and more than 1000000 are not read",
        "# " + "x" * 10_000_000,
    ),
    "tab": Broken(
        "config: r.yaml:2: tab in the indentation -> indent with spaces", edited("  name: demo", "\tname: demo")
    ),
    "not UTF-8": Broken(
        "config: r.yaml:2: is not UTF-8 text (byte 0xe9) -> save it as UTF-8",
        SOUND.replace("demo", "d\u00e9mo").encode("latin-1"),
    ),
    "UTF-16": Broken("config: r.yaml:1: is not UTF-8 text (byte 0xff) -> save it as UTF-8", SOUND.encode("utf-16")),
    "control character": Broken(
        "config: r.yaml:2: character U+0000 is not allowed in a recipe", edited("demo", "de\x00mo")
    ),
    "empty": Broken("config: r.yaml: is empty -> start from recipes/tiny.yaml", ""),
    "only comments": Broken("config: r.yaml: is empty -> start from recipes/tiny.yaml", "# nothing yet\n"),
    "a list": Broken(
        "config: r.yaml:1: a recipe is made of sections (run:, data:, ...), this is a list -> start from recipes/tiny.yaml",
        "- run\n",
    ),
    "a word": Broken(
        "config: r.yaml:1: a recipe is made of sections (run:, data:, ...), this is text -> start from recipes/tiny.yaml",
        "hello\n",
    ),
    "two documents": Broken(
        "config: r.yaml:14: a second document starts here ('---') -> a recipe is one document", SOUND + "---\nrun: {}\n"
    ),
    "open bracket": Broken(
        "config: r.yaml:6: a bracket is not closed, or a comma is missing -> close every [ with ] and every { with }",
        edited("heat.zarr", "[heat.zarr"),
    ),
    "open quote": Broken(
        "config: r.yaml:2: a quote or bracket is not closed -> close it; a recipe is one YAML document",
        edited("demo", '"demo'),
    ),
    "colon in a value": Broken(
        "config: r.yaml:2: a ':' where only a value can stand -> put the value in quotes, or add the ':' missing in the line above",
        edited("name: demo", "name: demo: two"),
    ),
    "no colon": Broken(
        "config: r.yaml:3: a ':' where only a value can stand -> put the value in quotes, or add the ':' missing in the line above",
        edited("  name: demo", "  name demo\n  seed: 1"),
    ),
    "bad indentation": Broken(
        "config: r.yaml:14: expected 'name: value' -> check the indentation and the ':' of this line and the one above",
        edited("  precision: float32", "    precision: float32\n  compile: true"),
    ),
    "reserved character": Broken(
        "config: r.yaml:2: a value starts with a character that YAML keeps for itself -> put the value in quotes",
        edited("demo", "@demo"),
    ),
    "octal or decimal": Broken(
        "config: r.yaml:8: 032 is octal to some YAML readers and decimal to others -> write 32, or '032' in quotes for text",
        edited("width: 32", "width: 032"),
    ),
    "complex key": Broken(
        "config: r.yaml:14: a field name must be plain text -> write 'name: value'", SOUND + "? [a, b]\n: 1\n"
    ),
    "wrong version": Broken(
        "config: r.yaml:1: version = 2: expected 1 -> Version of the recipe format.", "version: 2\n" + SOUND
    ),
    "include loop": Broken(
        "config: b.yaml:1: include: goes round in a loop: r.yaml -> b.yaml -> r.yaml -> remove one include",
        "include: b.yaml\n" + SOUND,
        files={"b.yaml": "include: r.yaml\n"},
    ),
    "include of itself": Broken(
        "config: r.yaml:1: include: goes round in a loop: r.yaml -> r.yaml -> remove one include",
        "include: r.yaml\n" + SOUND,
    ),
    "include that is missing": Broken(
        "config: r.yaml:1: include: bse.yaml: no such file -> did you mean base.yaml?",
        "include: bse.yaml\n" + SOUND,
        files={"base.yaml": SOUND},
    ),
    "include of a directory": Broken(
        "config: r.yaml:1: include: .: is a directory -> name a YAML file, or a run directory with config.yaml",
        "include: .\n" + SOUND,
    ),
    "include of no file at all": Broken(
        "config: r.yaml:1: include: a\0b: cannot be read: embedded null byte", 'include: "a\\0b"\n' + SOUND
    ),
    "half a character": Broken(
        "config: r.yaml:2: is not YAML: found invalid Unicode character escape code -> check this line",
        edited("demo", '"\\ud800"'),
    ),
    "include of a number": Broken(
        "config: r.yaml:1: include: expected a file name or a list of file names -> write 'include: base.yaml', relative to this file",
        "include: 3\n" + SOUND,
    ),
    "include that multiplies": Broken(
        "config: a.yaml:1: include: b.yaml: more than 64 files -> include fewer",
        "include: [a.yaml, a.yaml, a.yaml, a.yaml, a.yaml]\n",
        files={
            "a.yaml": "include: [b.yaml, b.yaml, b.yaml, b.yaml, b.yaml]\n",
            "b.yaml": "include: [c.yaml, c.yaml, c.yaml, c.yaml]\n",
            "c.yaml": "run: {name: x}\n",
        },
    ),
    "mistake in an included file": Broken(
        "config: sub/base.yaml:8: model.width = -1: expected at least 8 channels -> Channels of a latent token.",
        "include: sub/base.yaml\n",
        files={"sub/base.yaml": edited("width: 32", "width: -1")},
    ),
    "override without a value": Broken(
        "config: --set model.width: expected field=value -> for example --set engine.precision=bfloat16",
        overrides=("model.width",),
    ),
    "override without a name": Broken(
        "config: --set : expected field=value -> for example --set engine.precision=bfloat16", overrides=("=3",)
    ),
    "override of an unknown field": Broken(
        "config: --set model.widht = 64: no such field in model -> did you mean 'width'?", overrides=("model.widht=64",)
    ),
    "override of the wrong type": Broken(
        'config: --set model.width = "wide": expected a whole number -> Channels of a latent token.',
        overrides=("model.width=wide",),
    ),
    "override past the end of a list": Broken(
        "config: --set stages.1.steps: stages is a list and has no entry '1' -> entries: only 0",
        overrides=("stages.1.steps=5",),
    ),
    "override by name in a list": Broken(
        "config: --set stages.operator.steps: stages is a list and has no entry 'operator' -> entries: only 0",
        overrides=("stages.operator.steps=5",),
    ),
    "override through a value": Broken(
        "config: --set run.name.first: run.name is text and has no field 'first'", overrides=("run.name.first=5",)
    ),
    "override that is not YAML": Broken(
        "config: --set data.tasks.0.path: a bracket is not closed, or a comma is missing -> close every [ with ] and every { with }",
        overrides=("data.tasks.0.path=[a",),
    ),
    "override with a tag": Broken(
        "config: --set run.name: tag '!!python/name:os.system' is not allowed -> a recipe holds plain values only: remove the tag",
        overrides=("run.name=!!python/name:os.system",),
    ),
    "override of include": Broken(
        "config: --set include: 'include' cannot be set -> write it into the recipe", overrides=("include=x.yaml",)
    ),
    "override with bytes that are no text": Broken(
        "config: --set run.name: character U+DCFF is not allowed in a recipe", overrides=("run.name=\udcff",)
    ),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.timeout(10)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_mistake_gives_its_line(case: Broken, here: Path) -> None:
    (here / "r.yaml").write_bytes(case.text if isinstance(case.text, bytes) else case.text.encode())
    for name, text in case.files.items():
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).write_text(text)
    start = time.process_time()
    with pytest.raises(ConfigError) as caught:
        resolve("r.yaml", case.overrides)
    assert time.process_time() - start < 1
    assert caught.value.one_line() == case.line
