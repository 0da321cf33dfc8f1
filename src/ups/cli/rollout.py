"""`ups rollout`: simulate with a bundle, from any input our readers know or NetCDF, to a store, a picture, a film."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ups.cli.options import BUNDLE_HELP, JsonOption, PluginOption, StartFrameOption, new_app
from ups.cli.output import note, report, say
from ups.config.schema import TaskConfig
from ups.errors import ConfigError, DataError
from ups.record.run_dir import shipped_models, states_beside
from ups.run.progress_line import ProgressLine

if TYPE_CHECKING:
    from ups.cli.meshes import OnMesh
    from ups.evaluation.figures import Example
    from ups.inference.simulator import Simulator
    from ups.spec.task import TaskSpec

app = new_app()

DEFAULT_STEPS = 40
# Enough for the mean of a train split to be next to an error.
MEAN_TRAJECTORIES = 64


@app.command()
def rollout(
    bundle: Annotated[str, typer.Argument(metavar="RUN|BUNDLE", help=BUNDLE_HELP)],
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="INPUT",
            help="Where to start: a store, or a NumPy, HDF5, NetCDF or Zarr file; default the data of the run, or what "
            "came with the model.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write it: NetCDF (FILE.nc), VTKHDF for ParaView (FILE.vtkhdf), else Zarr.",
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(
            metavar="POINTS.csv",
            help="Write values at points, to FILE.csv or FILE.nc: a column for each axis, and maybe time.",
        ),
    ] = None,
    in_time: Annotated[
        bool, typer.Option("--in-time", help="Interpolate to times of POINTS.csv between frames, else refused.")
    ] = False,
    reversed_axes: Annotated[
        bool, typer.Option("--reversed-axes", help="Write variables in the order time, z, y, x.")
    ] = False,
    film: Annotated[
        str | None, typer.Option(metavar="FILE.mp4", help="Make a film: FILE.gif, or FILE.mp4 (extra: report).")
    ] = None,
    picture: Annotated[str | None, typer.Option(metavar="FILE.png", help="Draw a picture.")] = None,
    field: Annotated[
        str | None, typer.Option(metavar="NAME", help="Field to draw, such as h or velocity_x; default the first.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Which task, if the bundle knows several.")] = None,
    parameter: Annotated[
        list[str],
        typer.Option(metavar="NAME=VALUE", help="A parameter that INPUT does not carry; may be given many times."),
    ] = [],  # noqa: B006 - typer copies it
    steps: Annotated[
        int | None, typer.Option(help="How many steps; default as many as the input has, else 40.")
    ] = None,
    every: Annotated[int, typer.Option(help="Keep every n-th frame.", min=1)] = 1,
    members: Annotated[
        int | None, typer.Option(help="Members of an ensemble; pictures and errors are of their mean.", min=1)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the noise that makes members differ.", min=0)] = 0,
    level: Annotated[
        float | None, typer.Option(help="Add error bars that hold with this chance, of a calibrated bundle: 0.9.")
    ] = None,
    on_doubt: Annotated[
        str, typer.Option(help="Further out than calibrated: warn, stop (later frames are missing) or ignore.")
    ] = "warn",
    split: Annotated[str, typer.Option(help="Split of the input to take the trajectory from.")] = "test",
    trajectory: Annotated[int, typer.Option(help="Which trajectory of the split.", min=0)] = 0,
    start_frame: StartFrameOption = None,
    problem: Annotated[
        str | None, typer.Option(help="Problem of PDEBench that INPUT holds, where it does not say so.")
    ] = None,
    rescale_domain: Annotated[
        bool, typer.Option("--rescale-domain", help="Map another length or origin of INPUT to the trained domain.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    runtime: Annotated[
        str, typer.Option(help="eager (torch), onnx (onnxruntime), or auto: onnx where it was exported and is faster.")
    ] = "eager",
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Simulate step by step from a state of INPUT, and write the result, a picture or a film.

    Without INPUT it starts from a test trajectory of what came with the model, or of the data it was trained on.

    Where INPUT has the frames that follow, truth, prediction and error stand side by side.
    """
    from ups.cli.meshes import MESH_SUFFIX, write_mesh_result
    from ups.cli.points import VALUE_SUFFIXES, read_points, values_at, write_values
    from ups.inference.hub import local_bundle
    from ups.inference.results import VTKHDF_SUFFIX, check_new, write_vtkhdf

    if out is None and film is None and picture is None:
        raise ConfigError(
            "nothing to write", hint="give -o RESULT.zarr or RESULT.nc, --film FILM.mp4 or --picture PICTURE.png"
        )
    for suffixes, option, name in (((".mp4", ".gif"), "--film", film), ((".png",), "--picture", picture)):
        if out is not None and Path(out).suffix.lower() in suffixes:
            raise ConfigError(f"-o writes numbers, not {out}", hint=f"give {option} {out} instead")
        if name is not None and Path(name).suffix.lower() not in suffixes:
            ends = " or ".join(suffixes)
            kinds = ends.replace(".", "").upper()
            raise ConfigError(f"{option} writes {kinds}, not '{name}'", hint=f"give a name that ends in {ends}")
    if at is not None and Path(out or "").suffix not in VALUE_SUFFIXES:
        raise ConfigError("values at points are written as CSV or NetCDF", hint="give -o VALUES.csv or VALUES.nc")
    vtkhdf = out is not None and Path(out).suffix == VTKHDF_SUFFIX
    mesh = out is not None and Path(out).suffix == MESH_SUFFIX
    if vtkhdf or mesh or at is not None:
        check_new(Path(out or ""))
    if film is not None and not film.lower().endswith(".gif"):
        from ups.evaluation.figures import ffmpeg

        ffmpeg()  # before long work, not after
    model_dir = local_bundle(bundle)
    simulator = _load(model_dir, device, runtime)
    spec = simulator.task(task)
    channel = _channel(spec, field)
    table = None if at is None else read_points(at, spec)
    start = _read_input(simulator, spec, _data(model_dir, spec, source, problem), split, trajectory, start_frame)
    start = _with_parameters(spec, start, parameter)
    count = steps if steps is not None else 1 if spec.steady else start.num_true_steps or DEFAULT_STEPS
    with ProgressLine(quiet=json) as line:
        result = simulator.rollout(
            **start.arguments,
            steps=count,
            task=spec.name,
            rescale_domain=rescale_domain,
            every=every,
            members=members,
            seed=seed,
            out=None if vtkhdf or mesh or at is not None else out,
            reversed_axes=reversed_axes,
            level=level,
            on_doubt=on_doubt,
            progress=lambda done: line.count("rollout", done, count, "steps"),
        )
    if vtkhdf and start.on_mesh is None:
        write_vtkhdf(result, spec, Path(out or ""))
    values = None if table is None else values_at(simulator, result, table, spec, in_time=in_time)
    if values is not None:
        write_values(values, table, spec, Path(out or ""))
    written = [out] if out is not None else []
    example = None
    if film or picture or mesh or start.on_mesh is not None or start.num_true_steps >= count:
        example = _example(spec, result, start, every)
        written += _draw(example, channel, film, picture)
    errors = {} if example is None else _errors(example, start)
    if example is not None and start.on_mesh is not None:
        errors |= start.on_mesh.errors(example, every)
    if mesh or (vtkhdf and start.on_mesh is not None):
        write_mesh_result(example, start.on_mesh, Path(out or ""))
    if json:
        facts = {"task": spec.name, "steps": count, "errors": errors, "written": written, "notes": list(start.notes)}
        attributes = dict((result if values is None else values).attrs)
        report(facts | {"samples": _judged(result), "attributes": attributes})
        return
    say(_summary(spec, start, count, errors, members) + _divergence(result))
    if level is not None:
        for fields in spec.fields_of(spec.predicted):
            say(_error_words(fields.name, result[f"{fields.name}_error"], level, _measured(example, fields.name)))
    for name in ("values", "interpolation", "interpolation_error", "time_interpolation_error"):
        if values is not None and name in values.attrs:
            say(f"{name.replace('_', ' ')}: {values.attrs[name]}")
    for text in start.notes:
        note(f"note: {text}")
    if result.attrs["warnings"]:
        note(f"warning: {result.attrs['warnings']}")
    for name in written:
        say(f"wrote {name}")
    if example is not None and (film or picture) and field is None and len(example.channels) > 1:
        others = ", ".join(example.channels[1:])
        note(f"note: drawn is {example.channels[0]}; --field draws {others}")


def _load(bundle: Path, device: str = "auto", runtime: str = "eager") -> Simulator:
    from ups.inference.simulator import BundleWarning, Simulator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BundleWarning)  # the result says it, too
        return Simulator.load(bundle, device=device, runtime=runtime)


def _channel(spec: TaskSpec, field: str | None) -> int:
    """Which channel a field's name means: that of a scalar, or a component of a vector by the name of both."""
    channels = spec.channel_names(spec.predicted)
    if field is None:
        return 0
    if field not in channels:
        raise ConfigError(f"task '{spec.name}' predicts no field '{field}'", hint=f"draw one of {', '.join(channels)}")
    return channels.index(field)


def _with_parameters(spec: TaskSpec, start: _Input, texts: list[str]) -> _Input:
    """The input with the parameters of the command line. Raises ConfigError where they contradict it."""
    import numpy as np

    known = dict(start.arguments.get("parameters") or {})
    for text in texts:
        name, _, number = text.partition("=")
        try:
            value = float(number)
        except ValueError as error:
            hint = "--parameter NAME=VALUE, such as nu=0.01"
            raise ConfigError(f"'{text}' is no parameter with its value", hint=hint) from error
        if name in known and not np.allclose(known[name], value, rtol=1e-6, atol=0):
            raise ConfigError(
                f"{start.source} says that {name} is {float(np.ravel(known[name])[0]):g}, and not {value:g}",
                hint="leave --parameter out: it is for inputs that do not carry the parameter",
            )
        known[name] = value
    return replace(start, arguments=start.arguments | {"parameters": known or None})


def _judged(result: Any) -> list[dict[str, Any]]:
    """What is said about each sample, for programs."""
    import numpy as np

    from ups.inference.trust import kinds_of

    flags = np.atleast_1d(result["warnings"].values)
    judged: list[dict[str, Any]] = [
        {"warnings": kinds_of(int(f)), "blew_up": step is not None, "diverged_at": step}
        for f, step in zip(flags, _diverged_at(result), strict=True)
    ]
    if "p_value" in result:
        last = result["p_value"].isel(time=-1) if "time" in result["p_value"].dims else result["p_value"]
        pairs = zip(np.atleast_1d(last.values), np.atleast_1d(result["outside_at"].values), strict=True)
        for one, (p_value, step) in zip(judged, pairs, strict=True):
            one |= {"p_value": round(float(p_value), 6), "outside_at": int(step) or None}
    return judged


def _error_words(name: str, errors: Any, level: float, measured: Any = None) -> str:
    """What is stated about a field of the first sample. measured: its RMS error at each time, where that is known."""
    stated = errors.isel({"sample": 0} if "sample" in errors.dims else {}).values.ravel()
    when = " at each time" * ("time" in errors.dims)
    text = f"RMS error of {name}{when}, with a chance of {level:g} below {_ends(stated) or 'no statement'}"
    if measured is None:
        return text
    known = stated == stated  # NaN where nothing is stated
    return f"{text}; measured {_ends(measured)}, below at {int((measured <= stated).sum())} of {int(known.sum())}"


def _ends(values: Any) -> str:
    """The first and the last of the values that are known: NaN where nothing is stated."""
    known = values[values == values]
    return " to ".join(f"{value:.3g}" for value in known[:: max(1, len(known) - 1)][:2])


def _measured(example: Example | None, field: str) -> Any:
    """(T,): the RMS error of a field at each time, as error bars state it; None without the truth."""
    if example is None or example.truth is None:
        return None
    import torch

    from ups.evaluation.metrics import without_holes
    from ups.models.error_model import field_rms
    from ups.spec.grid import point_weights

    per_point = point_weights(example.task.axes, example.coordinates)
    weights = None if per_point is None else torch.from_numpy(per_point)
    names = [one.name for one in example.task.fields_of(example.task.predicted)]
    difference = torch.from_numpy(example.prediction - example.truth)
    if example.task.mask:
        weights = without_holes(weights, (~difference[:1, :1].isnan()).double())
        difference = difference.nan_to_num()
    return field_rms(difference, example.task, weights)[:, names.index(field)].numpy()


def _diverged_at(result: Any) -> list[int | None]:
    """The step at which each sample diverged, of members the first one that did; None if it has not."""
    import numpy as np

    steps = result["diverged_at"]
    steps = steps.where(steps > 0)
    first = np.atleast_1d((steps.min("member") if "member" in steps.dims else steps).values)
    return [None if np.isnan(step) else int(step) for step in first]


def _divergence(result: Any) -> str:
    """The end of the printed line of a result that has diverged; '' for any other."""
    steps = [step for step in _diverged_at(result) if step is not None]
    if not steps:
        return ""
    when = "" if "time" not in result.dims else f" at step {min(steps)}"
    return f"; DIVERGED{when}" if result["diverged_at"].ndim == 0 else f"; {len(steps)} DIVERGED, the first{when}"


@dataclass(frozen=True)
class _Input:
    """Arguments of `Simulator.rollout`, and where they come from.

    given (T, C, *S) and truth (T, C, *S): the frames up to the start and those that follow, where the input has them;
    time: of the last given frame; mean (C, *S): of the train split of the input, if it has one. notes: what was assumed
    about the input. on_mesh: the points that its fields live on.
    """

    arguments: dict[str, Any]
    source: str
    trajectory: int = -1
    given: Any = None
    truth: Any = None
    time: float = 0.0
    mean: Any = None
    notes: tuple[str, ...] = ()
    split: str = ""
    on_mesh: OnMesh | None = None

    @property
    def num_true_steps(self) -> int:
        return 0 if self.truth is None else len(self.truth)

    @property
    def parameters(self) -> dict[str, float]:
        """Of the first sample."""
        import numpy as np

        return {name: float(np.ravel(value)[0]) for name, value in (self.arguments.get("parameters") or {}).items()}

    def given_fields(self, spec: TaskSpec) -> dict[str, Any]:
        """Name -> values (*S) of each given channel of a steady task, of the first sample; {} where it is not known."""
        import numpy as np

        if not spec.steady:
            return {}
        names = spec.channel_names("static")
        static, dataset = self.arguments.get("static"), self.arguments.get("state")
        if static is not None:
            return dict(zip(names, static, strict=True))
        axes = [axis.name for axis in spec.axes]
        fields = {}
        for field in spec.fields_of("static"):
            if dataset is None or field.name not in dataset or field.tensor_rank:
                return {}
            values = dataset[field.name]
            for extra in set(values.dims) - set(axes):
                values = values.isel({extra: 0})
            fields[field.name] = np.asarray(values.transpose(*axes).values)
        return fields


def _data(bundle: Path, spec: TaskSpec, source: str | None, problem: str | None) -> TaskConfig:
    """The data to start from: what was asked for, or that of the run."""
    from ups.library.finetune import description_for, own_data

    if source is None and (states := states_beside(bundle, spec.name)) is not None:
        return TaskConfig(name=spec.name, path=str(states))
    if source is None:
        known = own_data(bundle, spec.name)
        if known.description is not None or not isinstance(known.path, str):
            return known
        return known.model_copy(update={"description": description_for(bundle, known.path, spec.name)})
    described = description_for(bundle, source, spec.name)
    return TaskConfig(name=spec.name, path=source, problem=problem, description=described)


def _read_input(
    simulator: Simulator, spec: TaskSpec, config: TaskConfig, split: str, trajectory: int, start_frame: int | None
) -> _Input:
    import numpy as np

    from ups.cli.meshes import OnMesh
    from ups.data.open import open_task
    from ups.evaluation.rollout import mean_field
    from ups.formats.mesh_grid import on_trained_grid

    source = config.paths[0]
    described = on_trained_grid(config.description, source, spec, simulator.coordinates(spec.name))
    config = config.model_copy(update={"description": described})
    netcdf = Path(source).suffix in (".nc", ".nc4", ".cdf")
    if netcdf and config.description is None:
        return _read_netcdf(spec, source, trajectory, start_frame)
    try:
        reader = open_task(config)
    except DataError:
        if not netcdf:
            raise
        # not laid out as the data that was trained on: fields to start from
        return _read_netcdf(spec, source, trajectory, start_frame)
    stride = _time_stride(spec, reader.task, source)
    if stride > 1:
        reader = open_task(config.model_copy(update={"time_stride": stride * config.time_stride}))
        note(f"the time step of the simulator is {spec.dt:g}: one in {stride} frames of '{source}' is used")
    if reader.splits.get(split, 0) <= trajectory:
        counts = ", ".join(f"{count} in {name}" for name, count in reader.splits.items() if count)
        raise DataError(
            f"'{source}' has {reader.splits.get(split, 0)} trajectories in split '{split}', and so no {trajectory}",
            hint=f"it has {counts or 'none at all'}: choose with --split and --trajectory",
        )
    parameters = [p.name for p in reader.task.parameters]
    if spec.steady:
        window = reader.read(split, trajectory, 0, 0)
        arguments: dict[str, Any] = {"static": window.static}
        frames, truth, time = None, window.target[None], 0.0
    else:
        context = simulator.context_frames
        first = 0 if start_frame is None else start_frame - context + 1
        window = reader.read(split, trajectory, first, reader.frames_in(split, trajectory) - first)
        frames = window.state[:context]
        static = window.static if window.static.size else None
        arguments = {"state": frames if context > 1 else frames[0], "static": static}
        truth, time = window.state[context:], float(reader.times_in(split, trajectory)[first + context - 1])
        arguments["time"] = time
        arguments |= {"dt": window.dt} if spec.dt_range is not None or "dt" in reader.differing else {}
    arguments["parameters"] = dict(zip(parameters, window.parameters.tolist(), strict=True))
    notes = tuple(f"assumed about '{Path(source).name}': {text}" for text in reader.assumptions)
    axes = [axis.name for axis in reader.task.axes]
    arguments["coordinates"] = dict(zip(axes, reader.coordinates, strict=True))
    mean = mean_field(reader, MEAN_TRAJECTORIES).numpy() if reader.splits.get("train", 0) else None
    on_mesh = OnMesh.of(reader, split, trajectory, window) if reader.most_points else None
    # A file of points may lack what is asked for.
    known = None if np.isnan(truth).all() else truth
    where = f"{split} trajectory {trajectory}"
    return _Input(arguments, where, trajectory, frames, known, time, mean, notes, split, on_mesh)


def _time_stride(spec: TaskSpec, stored: TaskSpec, source: str) -> int:
    """How many frames of the input make one step of the simulator. Raises DataError if the input is another problem."""
    pairs = [
        ("steady", spec.steady, stored.steady),
        ("fields", spec.fields, stored.fields),
        ("boundaries", [(a.name, a.boundary) for a in spec.axes], [(a.name, a.boundary) for a in stored.axes]),
    ]
    for what, trained, present in pairs:
        if trained != present:
            raise DataError(f"'{source}' is another problem than task '{spec.name}': it has other {what}")
    if spec.dt_range is not None and spec.dt_range[0] <= stored.dt <= spec.dt_range[1]:
        return 1
    stride = 1 if spec.steady else round(spec.dt / stored.dt)
    if not spec.steady and (stride < 1 or abs(stride * stored.dt - spec.dt) > 1e-3 * spec.dt):
        raise DataError(
            f"frames of '{source}' are {stored.dt:g} apart in time; task '{spec.name}' was trained with a time step of "
            f"{spec.dt:g}, which is no multiple of it"
        )
    return stride


def _read_netcdf(spec: TaskSpec, source: str, trajectory: int, start_frame: int | None) -> _Input:
    """Fields to start from; of several frames those up to `start_frame`, by default all."""
    from ups.formats.hdf5 import read_netcdf

    netcdf = read_netcdf(source)
    dataset, num_frames = netcdf.dataset, netcdf.dataset.sizes.get("time", 1)
    if trajectory:
        raise DataError(f"'{source}' has no trajectories with numbers", hint="leave --trajectory out")
    if start_frame is not None and not 0 <= start_frame < num_frames:
        raise DataError(f"'{source}' has {num_frames} frames, and so no frame {start_frame}")
    if start_frame is not None and "time" in dataset.dims:
        dataset = dataset.isel(time=slice(0, start_frame + 1))
    notes = [f"not read from '{Path(source).name}': {text}" for text in netcdf.left_out]
    if start_frame is None and num_frames > 1 and not spec.steady:
        notes.append(f"the rollout starts from the last of {num_frames} frames; --start-frame chooses another")
    bare = [axis.name for axis in spec.axes if axis.name not in dataset.coords]
    if bare:
        notes.append(
            f"'{Path(source).name}' has no coordinates for {', '.join(bare)}: nothing is known about the spacing "
            "of its points, and the trained domain is assumed"
        )
    carried = {p.name: dataset[p.name] for p in spec.parameters if p.name in dataset}
    return _Input({"state": dataset, "parameters": carried}, Path(source).name, notes=tuple(notes))


def _example(spec: TaskSpec, result: Any, start: _Input, every: int) -> Example:
    """The first sample of a result as a picture book, with the truth for as long as there is one."""
    import numpy as np

    from ups.evaluation.figures import Example

    role = spec.predicted
    parts, units = [], []
    for field in spec.fields_of(role):
        values = result[field.name]
        values = values.isel(sample=0) if "sample" in values.dims else values
        values = values.mean("member") if "member" in values.dims else values
        values = values.transpose(..., *(axis.name for axis in spec.axes))
        array = values.values[None] if spec.steady else values.values
        array = array if field.tensor_rank else array[:, None]  # (T, c, *S)
        parts.append(array)
        units += [field.unit] * array.shape[1]
    prediction = np.concatenate(parts, axis=1).astype(np.float64)
    truth = None
    if start.truth is not None:
        frames = start.truth if spec.steady else start.truth[every - 1 :: every]
        truth = frames[: len(prediction)].astype(np.float64) if len(frames) >= len(prediction) else None
    if spec.mask and truth is not None:
        truth[np.isnan(prediction)] = np.nan  # holes, as pictures show them
    first = 0.0 if spec.steady else float(result["time"][0])
    diverged_at = _diverged_at(result)[0]
    first_bad = None if diverged_at is None else -(-diverged_at // every) - 1
    return Example(
        task=spec,
        trajectory=start.trajectory,
        split=start.split,
        first_step_time=first,
        step_time=start.arguments.get("dt", spec.dt) * every,
        channels=spec.channel_names(role),
        units=tuple(units),
        coordinates=tuple(result[axis.name].values for axis in spec.axes),
        prediction=prediction,
        truth=truth,
        parameters=start.parameters,
        given=start.given_fields(spec),
        given_units=tuple(f.unit for f in spec.fields_of("static") for _ in range(f.num_channels(len(spec.axes)))),
        diverged_at=first_bad if first_bad is not None and first_bad < len(prediction) else None,
    )


def _errors(example: Example, start: _Input) -> dict[str, float]:
    """Predictor -> error over the rollout, relative to the RMS of the trajectory, as `ups eval` defines it."""
    if example.truth is None:
        return {}
    import numpy as np
    import torch

    from ups.evaluation.metrics import trajectory_rms, trmse
    from ups.spec.grid import point_weights

    holes = np.isnan(example.prediction[0, 0])

    def frames(array: Any) -> torch.Tensor:
        return torch.from_numpy(np.where(holes, 0, array) if example.task.mask else array).double()[None]

    truth, whole = frames(example.truth), frames(start.truth)
    predictions = {"model": frames(example.prediction)}
    if start.given is not None:
        context = frames(start.given)
        whole = torch.cat([context, whole], dim=1)
        predictions["persistence"] = context[:, -1:].expand_as(truth)
    if start.mean is not None and start.mean.shape == example.truth.shape[1:]:
        predictions["training mean"] = frames(start.mean).expand_as(truth)
    per_point = point_weights(example.task.axes, example.coordinates)
    weights = None if per_point is None else torch.from_numpy(per_point)
    scale = trajectory_rms(whole, weights)
    return {name: float(trmse(p, truth, scale, weights).mean()) for name, p in predictions.items()}


def _summary(spec: TaskSpec, start: _Input, steps: int, errors: dict[str, float], members: int | None) -> str:
    values = ", ".join(f"{name} = {value:.3g}" for name, value in start.parameters.items())
    what = spec.name if spec.steady else f"{spec.name}, {steps} steps"
    what += "" if members is None else f", mean of {members} members"
    text = f"{what} from {start.source}" + (f" ({values})" if values else "")
    if not errors:
        return text
    others = ", ".join(f"{name} {error:.3g}" for name, error in errors.items() if name != "model")
    shown_references = f" ({others})" if others else " (no reference: the input has no train split)"
    return f"{text}: error {errors['model']:.3g}{shown_references}, relative to the RMS of the trajectory"


def _draw(example: Example, channel: int, film: str | None, picture: str | None) -> list[str]:
    from ups.evaluation.figures import even, fields_png
    from ups.evaluation.figures import film as draw_film
    from ups.record.files import write_file_atomically

    written = []
    example = even(example)
    make_film = functools.partial(draw_film, gif=(film or "").lower().endswith(".gif"))
    for name, draw in ((picture, fields_png), (film, make_film)):
        if name is not None:
            content = draw(example, channel)
            if content is None:
                raise DataError("a film needs at least two frames", hint="ask for more --steps, or for a --picture")
            write_file_atomically(Path(name), content)
            written.append(name)
    return written


demo_app = new_app()
# Shown where no task is asked for: a plane that moves.
DEMO_MODEL, DEMO_TASK, DEMO_LEVEL = "ups-joint", "ns2d", 0.9


@demo_app.command()
def demo(
    task: Annotated[str | None, typer.Argument(metavar="TASK", help=f"Which task; default {DEMO_TASK}.")] = None,
    trajectory: Annotated[int, typer.Option(help="Which of the test trajectories that came along.", min=0)] = 0,
    json: JsonOption = False,
) -> None:
    """Roll out the model that comes with the package, and make a film of prediction, truth and error here."""
    import time

    from ups.evaluation.figures import film_suffix

    model = shipped_models().get(DEMO_MODEL)
    if model is None:
        raise ConfigError(f"this copy of ups comes without {DEMO_MODEL}", hint="install the released package")
    simulator = _load(model)
    spec = simulator.task(task or DEMO_TASK)
    start = _read_input(simulator, spec, _data(model, spec, None, None), "test", trajectory, None)
    count = 1 if spec.steady else start.num_true_steps
    began = time.perf_counter()
    with ProgressLine(quiet=json) as line:
        result = simulator.rollout(
            **start.arguments,
            steps=count,
            task=spec.name,
            level=DEMO_LEVEL,
            progress=lambda done: line.count("rollout", done, count, "steps"),
        )
        seconds = (time.perf_counter() - began) / count
        line.working("drawing")
        example = _example(spec, result, start, 1)
        name = f"ups-demo-{spec.name}{'.png' if spec.steady else film_suffix()}"
        _draw(example, 0, None if spec.steady else name, name if spec.steady else None)
    errors = _errors(example, start)
    if json:
        facts = {"model": DEMO_MODEL, "task": spec.name, "steps": count, "errors": errors, "seconds_per_step": seconds}
        report(facts | {"written": [name], "samples": _judged(result), "attributes": dict(result.attrs)})
        return
    say(f"{DEMO_MODEL}, one model for {', '.join(simulator.tasks)}")
    say(_summary(spec, start, count, errors, None) + _divergence(result))
    for field in spec.fields_of(spec.predicted):
        say(_error_words(field.name, result[f"{field.name}_error"], DEMO_LEVEL, _measured(example, field.name)))
    say(f"{1e3 * seconds:.3g} ms per step")
    if result.attrs["warnings"]:
        note(f"warning: {result.attrs['warnings']}")
    say(f"wrote {name}")
