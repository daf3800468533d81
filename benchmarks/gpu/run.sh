#!/bin/bash
# Everything that can only be seen on real cards, on any machine with two: about 40 minutes, and 110 GB of disk.
#
#   benchmarks/gpu/run.sh FOLDER [PART ...]        FOLDER: on the disk that is to be measured
#
# Parts: preflight bytes disk checkpoint restart kill resume hang errors memory scaling; all of them where none is named.
# Each has a limit of its own, LIMIT_preflight=120 and so on changes it. A part that fails is said, the others
# go on, and the exit code is 1. FOLDER/results.md has all that came out.
#
# Peers of the checkpoint engine that are installed take part: pip install torch_checkpointing nvidia-resiliency-ext torchsnapshot
# accelerate lightning
# NVLink multicast (NVLS) stays off unless NCCL_NVLS_ENABLE is set.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:?"usage: benchmarks/gpu/run.sh FOLDER [PART ...]"}
shift
parts=${*:-preflight bytes disk checkpoint restart kill resume hang errors memory scaling}
python=${PYTHON:-python3}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$root" || exit 1
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"

script_of() {
  case $1 in
    bytes) echo check_bytes ;;
    errors) echo first_error ;;
    *) echo "$1" ;;
  esac
}

limit_of() {
  local changed="LIMIT_$1"
  case $1 in
    checkpoint) echo "${!changed:-1000}" ;;
    bytes | restart | hang | errors) echo "${!changed:-400}" ;;
    *) echo "${!changed:-200}" ;;
  esac
}

failed=""
for part in $parts; do
  script=$(script_of "$part")
  limit=$(limit_of "$part")
  began=$SECONDS
  echo "== $part, at most $limit s, at $(date -u +%H:%M:%S)"
  rm -f "$folder/$script.md"
  timeout --kill-after=15 "$limit" "$python" "benchmarks/gpu/$script.py" "$folder" >"$folder/$part.log" 2>&1
  code=$?
  tail -n 40 "$folder/$part.log" | cut -c1-300
  echo "== $part: exit code $code after $((SECONDS - began)) s"
  if [ "$code" != 0 ]; then failed="$failed $part($code)"; fi
done

{
  echo "# On real cards"
  echo
  "$python" -c "import sys; sys.path.insert(0, 'benchmarks/gpu'); import page; print(page.machine())"
  echo
  df -PT "$folder" | awk 'NR == 2 {print "Disk: " $2 ", " int($5 / 1048576) " GiB free."}'
  echo "Parts: $parts.${failed:+ Failed:$failed.}"
  for part in $parts; do
    page="$folder/$(script_of "$part").md"
    echo
    if [ -f "$page" ]; then cat "$page"; else echo "## $part: no page came out"; fi
  done
} >"$folder/results.md"
echo "== $folder/results.md"
if [ -n "$failed" ]; then
  echo "failed:$failed" >&2
  exit 1
fi
