#!/usr/bin/env bash
# From an empty directory to a film: makes an environment, data, a trained simulator and a film of what it predicts, with
# the commands of docs/quickstart.md. Run it in an empty directory; it is made for ten minutes on two free CPU cores.
#
#   mkdir first-film && cd first-film && bash PATH/TO/CHECKOUT/examples/quickstart.sh
#
# For a quick try, and for the tests:
#   QUICKSTART_VENV=PATH      use this environment instead of making one
#   QUICKSTART_DATA=OPTIONS   further options of `ups data generate`, for instance --small
#   QUICKSTART_TRAIN=OPTIONS  further options of `ups train`
#   QUICKSTART_RATIO=60       fail if the error is not so many times below persistence
set -euo pipefail

CHECKOUT=$(cd "$(dirname "$0")/.." && pwd)
read -ra data_options <<<"${QUICKSTART_DATA:-}"
read -ra train_options <<<"${QUICKSTART_TRAIN:-}"
bar=${QUICKSTART_RATIO:-60}

# say COMMAND...: show a command as one would type it, run it, and say how long it took.
say() {
  local begin=$SECONDS
  printf '\n$ %s\n' "$*"
  "$@"
  echo "[$((SECONDS - begin)) s]"
}

if [[ -z ${QUICKSTART_VENV:-} ]]; then
  say python3 -m venv ups-env
  say source ups-env/bin/activate
  say pip install --quiet torch==2.13.0
  say pip install --quiet --constraint "$CHECKOUT/.ci/constraints.txt" "$CHECKOUT[generate,report]"
else
  source "$QUICKSTART_VENV/bin/activate"
fi

say ups demo

say ups data generate burgers1d "${data_options[@]}"
say ups data inspect data/burgers1d.zarr --picture burgers1d.png

say ups train "$CHECKOUT/recipes/burgers1d.yaml" --ranks 2 "${train_options[@]}"

say ups eval burgers1d
say ups rollout burgers1d data/burgers1d.zarr --trajectory 3 --picture rollout.png --film rollout.mp4

python - "$bar" <<'PYTHON'
import json, sys

(result,) = json.load(open("runs/burgers1d/report/scores.json"))["results"]
model, persistence = (result["predictors"][name]["summary"]["one_step_trmse"] for name in ("model", "persistence"))
ratio, bar = persistence / model, float(sys.argv[1])
print(f"\none-step error {model:.4g}, persistence {persistence:.4g}: {ratio:.1f} times below (bar: {bar:g})")
sys.exit(None if ratio >= bar else "the error is not far enough below persistence: train longer")
PYTHON
echo "$SECONDS s in all. Look at burgers1d.png, rollout.png, rollout.mp4 and runs/burgers1d/report/index.html"
