"""Roll out an exported simulator with onnxruntime and numpy alone: neither torch nor ups is needed.

    python onnx_rollout.py EXPORT TASK STATE.npy [NAME=VALUE ...] [static=STATIC.npy]

EXPORT is what `ups export onnx` wrote, of a simulator that sees one frame. STATE.npy holds the first frame (channels,
x[, y[, z]]) on the grid of export.json, STATIC.npy given fields. Frames go to frames.npy.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

STEPS, LEVEL = 40, "0.9"

folder, name, start = Path(sys.argv[1]), sys.argv[2], np.load(sys.argv[3])
entry = json.loads((folder / "export.json").read_text())["tasks"][name]
session = onnxruntime.InferenceSession(folder / entry["file"], providers=["CPUExecutionProvider"])
inputs = {one.name: one for one in session.get_inputs()}

given = {"state": start[None].astype(np.float32)}  # one sample
values = dict(text.split("=") for text in sys.argv[4:])
if entry["parameters"]:
    given["parameters"] = np.array([[values[p] for p in entry["parameters"]]], np.float32)
if "static" in inputs:
    given["static"] = np.load(values["static"])[None].astype(np.float32)
if "components_before" in inputs:
    given["components_before"] = np.zeros((1, inputs["components_before"].shape[1]), np.float32)

frames = [given["state"]]
for step in range(1, STEPS + 1):
    if "step" in inputs:
        given["step"] = np.array([step])
    outputs = dict(zip(entry["outputs"], session.run(entry["outputs"], given), strict=True))
    given["state"] = outputs["frame"]
    frames.append(outputs["frame"])
    line = f"step {step}: RMS {np.sqrt(np.mean(outputs['frame'] ** 2)):.6f}"
    stated = entry["calibration"]
    if stated:
        given["components_before"] = outputs["components"]
    if stated and LEVEL in stated["levels"] and step in stated["leads"]:
        factors = stated["levels"][LEVEL]["error"][stated["leads"].index(step)]
        errors = np.array(factors, float) * np.exp(outputs["log_error"][0])  # null: nothing is stated
        line += f", error of each field below {np.array2string(errors, precision=3)} with a chance of {LEVEL}"
    print(line)
np.save("frames.npy", np.concatenate(frames))
