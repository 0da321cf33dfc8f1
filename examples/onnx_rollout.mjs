// Roll out an exported simulator with onnxruntime-web (plain wasm), under Node: npm install onnxruntime-web
//
//     node onnx_rollout.mjs EXPORT TASK STATE.f32 [NAME=VALUE ...] [static=STATIC.f32]
//
// EXPORT is what `ups export onnx` wrote, of a simulator that sees one frame. STATE.f32 holds the first frame (channels,
// x[, y[, z]]) as little-endian float32, STATIC.f32 given fields. Frames go to frames.f32.
import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import * as ort from "onnxruntime-web/wasm";

const STEPS = 40;
const LEVEL = "0.9";
const [folder, name, start, ...texts] = process.argv.slice(2);
const entry = JSON.parse(readFileSync(join(folder, "export.json"), "utf8")).tasks[name];
const sized = (input) => entry.inputs[input].map((size) => (size === "samples" ? 1 : size)); // one sample
const tensor = (input, values) => new ort.Tensor("float32", Float32Array.from(values), sized(input));
const stored = (path) => {
  const bytes = readFileSync(path);
  return new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.length));
};

ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create(readFileSync(join(folder, entry.file)), {
  // all tasks share this file
  externalData: [{ path: "weights.bin", data: readFileSync(join(folder, "weights.bin")) }],
});

const given = { state: tensor("state", stored(start)) };
const values = Object.fromEntries(texts.map((text) => text.split("=")));
if (entry.parameters.length) {
  given.parameters = tensor("parameters", entry.parameters.map((p) => Number(values[p])));
}
if (entry.inputs.static) given.static = tensor("static", stored(values.static));
if (entry.inputs.components_before) {
  given.components_before = tensor("components_before", new Float32Array(sized("components_before")[1]));
}

const frames = [given.state.data];
for (let step = 1; step <= STEPS; step++) {
  if (entry.inputs.step) given.step = new ort.Tensor("int64", [BigInt(step)], [1]);
  const outputs = await session.run(given);
  given.state = outputs.frame;
  frames.push(outputs.frame.data);
  const size = Math.sqrt(outputs.frame.data.reduce((sum, value) => sum + value * value, 0) / outputs.frame.data.length);
  let line = `step ${step}: RMS ${size.toFixed(6)}`;
  if (entry.calibration) {
    given.components_before = outputs.components;
    const factors = entry.calibration.levels[LEVEL]?.error[entry.calibration.leads.indexOf(step)];
    const errors = factors?.map((factor, field) => (factor * Math.exp(outputs.log_error.data[field])).toPrecision(3));
    if (errors) line += `, error of each field below ${errors} with a chance of ${LEVEL}`;
  }
  console.log(line);
}
writeFileSync("frames.f32", Buffer.concat(frames.map((f) => Buffer.from(f.buffer, f.byteOffset, f.byteLength))));
