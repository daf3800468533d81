#!/bin/sh
# On a machine with two cards or more: what preflight says, and whether it tells a hang, an error and a wrong sum apart.
# About five minutes. Prints a table and leaves it in FOLDER/preflight.md.
#
#   benchmarks/gpu/preflight.sh [FOLDER]        default: build/gpu
#
# NCCL_NVLS_ENABLE=0 in front of it, where in-switch reduction (NVLink multicast) is not available.
set -eu
cd "$(dirname "$0")/../.."
folder=${1:-build/gpu}
python=${PYTHON:-python3}
mkdir -p "$folder"
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
for reading in "topo -m" "topo -p2p r" "-q"; do
  name=$(echo "$reading" | tr -d ' -')
  # shellcheck disable=SC2086
  nvidia-smi $reading >"$folder/$name.txt" || true
  $python -m runner explain "$folder/$name.txt" || true
done
$python benchmarks/gpu/preflight.py "$folder"
