#!/usr/bin/env bash
# The first day on a GPU: bench/gpu/first_day.sh STAGE [OPTION...], where STAGE is 1 to 5, or all.
#   1  does anything run: the machine, its limits, the smallest launch of every kernel, memcheck, tests
#   2  the engine: the forward pass by each attention, with and without graphs, tests
#   3  kernels beside other packages, tiles, what a profiler sees
#   4  a server under load, reduced
#   5  final figures
# Each stage ends within ten minutes. --dry runs it small on a CPU. Results: $OUT/stage-*.{txt,json,log}.
#
# It runs from a plain checkout with torch and triton. What else it needs (other packages, the default model's
# tokeniser) it takes from the folder $OFFLINE, made where there is a network by
#   python -m maxsimd.bench.gpu.first_day.offline pack build/offline
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${GPU_PYTHON:-python3}
out=${OUT:-build/first-day}
offline=${OFFLINE:-build/offline}
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/tests/typings${PYTHONPATH:+:$PYTHONPATH}"

stage=${1:-}
case $stage in
    [1-5]) stages=$stage ;;
    all) stages="1 2 3 4 5" ;;
    *) sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; exit 2 ;;
esac
shift

# A failure here is no reason to stop: what is missing shows in the steps that need it.
if [ -d "$offline" ]; then
    site=$(mktemp -d)
    trap 'rm -rf "$site"' EXIT
    "$python" -m maxsimd.bench.gpu.first_day.offline unpack "$offline" "$site"
    export PYTHONPATH="$PYTHONPATH:$site"
fi

status=0
for each in $stages; do
    timeout --kill-after=15 585 "$python" -m maxsimd.bench.gpu.first_day "$each" --out "$out" "$@" || status=1
done
exit $status
