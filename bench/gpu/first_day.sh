#!/usr/bin/env bash
# All that only a GPU can show, in nine minutes: bench/gpu/first_day.sh [OPTION...]. Whether the kernels are right;
# MaxSim beside other packages; the forward pass of models; a server under load; tiles of MaxSim. --dry runs it small
# on a CPU. Results: $OUT/first-day.{txt,json,log}.
#
# It runs from a plain checkout with torch and triton. What else it needs (other packages, the default model's
# tokenizer) it takes from the folder $OFFLINE, made where there is a network by
#   python -m maxsimd.bench.gpu.first_day.offline pack build/offline
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
    "$python" -m maxsimd.bench.gpu.first_day.offline unpack "$offline" "$site"
    export PYTHONPATH="$PYTHONPATH:$site"
fi

# The models are made while the first steps run.
case " $* " in
    *" --dry "*) ;;
    *) "$python" -m maxsimd.bench.gpu.first_day.measure models >"${TMPDIR:-/tmp}/first-day-models.log" 2>&1 & ;;
esac
timeout --kill-after=5 535 "$python" -m maxsimd.bench.gpu.first_day --out "$out" "$@"
