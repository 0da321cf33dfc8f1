// A rollout of one step exported by `ups export onnx`, with the library of onnxruntime: for a task with one parameter of a
// bundle that is not calibrated. Not built or run by the tests.
#include <onnxruntime_cxx_api.h>
#include <vector>

int main() {
  Ort::Env env;
  Ort::SessionOptions options;
  Ort::Session session(env, "bundle-onnx/burgers1d.onnx", options);  // finds weights.bin beside it
  auto memory = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  std::vector<float> state(128), parameters{0.02f};  // fill in the first frame
  const std::vector<int64_t> state_shape{1, 1, 128}, parameter_shape{1, 1};
  const char* inputs[] = {"state", "parameters"};
  const char* outputs[] = {"frame"};
  for (int step = 0; step < 40; ++step) {
    Ort::Value given[] = {
        Ort::Value::CreateTensor<float>(memory, state.data(), state.size(), state_shape.data(), state_shape.size()),
        Ort::Value::CreateTensor<float>(memory, parameters.data(), parameters.size(), parameter_shape.data(),
                                        parameter_shape.size())};
    auto frames = session.Run(Ort::RunOptions{}, inputs, given, 2, outputs, 1);
    const float* frame = frames[0].GetTensorData<float>();
    state.assign(frame, frame + state.size());
  }
}
