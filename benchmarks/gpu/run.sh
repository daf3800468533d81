#!/bin/bash
# Everything that can only be seen on real cards, on any machine with two or more of them, in 30 to 40 minutes.
#
#   benchmarks/gpu/run.sh FOLDER [PART ...]        FOLDER: on the disk that is to be measured, 110 GB for all parts
#
# Parts, with what each took on two H200 in seconds: preflight 55, bytes 170, disk 50, checkpoint 800, restart 300, kill 100,
# resume 50, hang 140, errors 60, memory 50, scaling 45; all of them where none is named. Each has a limit of its own,
# LIMIT_preflight=300 and so on changes it. A part that fails is said, the others go on, and the exit code is 1.
# FOLDER/results.md has all that came out, FOLDER/PART.log what was printed.
#
# PYTHON: an interpreter that has torch and this project (pip install '.[train]'); default: python3.
# Peers of the checkpoint engine that are installed take part: pip install torch_checkpointing nvidia-resiliency-ext torchsnapshot
# accelerate lightning
# NVLink multicast (NVLS) stays off unless NCCL_NVLS_ENABLE is set. CUDA_VISIBLE_DEVICES chooses cards.
# REHEARSE=1: without cards, small, two processes on the processor; nothing is measured, only that all of it runs.
set -u
root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:?"usage: benchmarks/gpu/run.sh FOLDER [PART ...]"}
shift
all="preflight errors memory hang scaling resume kill bytes disk restart checkpoint"
parts=${*:-$all}
python=${PYTHON:-python3}
gpu="$root/benchmarks/gpu"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"

refuse() {
  echo "run.sh: $1" >&2
  exit 2
}

for part in $parts; do
  case " $all " in *" $part "*) ;; *) refuse "$part: expected one of $all" ;; esac
done
lacks=$("$python" -c "import torch, runner.job, vramfarm" 2>&1) ||
  refuse "$python cannot be used: ${lacks##*$'\n'}: set PYTHON to one that has torch, and: pip install '.[train]'"
cards=$("$python" -c "import sys; sys.path.insert(0, '$gpu'); import page; print(len(page.cards()))")
if [ "$cards" = 1 ]; then
  refuse "one card found, expected two or more; one card alone is measured by benchmarks/checkpoint.py"
elif [ "$cards" = 0 ] && [ -z "${REHEARSE:-}" ]; then
  refuse "no card found by nvidia-smi, expected two or more; REHEARSE=1 runs all of it small on the processor, measuring nothing"
fi
mkdir -p "$folder" || exit 2
folder=$(cd "$folder" && pwd)
cd "$root" || exit 1

script_of() {
  case $1 in
    bytes) echo check_bytes ;;
    errors) echo first_error ;;
    *) echo "$1" ;;
  esac
}

limit_of() {
  local changed="LIMIT_$1" usual
  case $1 in
    checkpoint) usual=1000 ;;
    bytes | hang | restart) usual=400 ;;
    *) usual=200 ;;
  esac
  [ "$cards" = 0 ] && usual=$((usual * 2))
  echo "${!changed:-$usual}"
}

failed="" number=0
for part in $parts; do
  script=$(script_of "$part")
  limit=$(limit_of "$part")
  number=$((number + 1))
  began=$SECONDS
  echo "== $part ($number of $(wc -w <<<"$parts")), at most $limit s, at $(date -u +%H:%M:%S)"
  rm -f "$folder/$script.md"
  timeout --kill-after=15 "$limit" "$python" -W ignore "$gpu/$script.py" "$folder" 2>&1 | tee "$folder/$part.log" | cut -c1-300
  code=${PIPESTATUS[0]}
  echo "== $part: exit code $code after $((SECONDS - began)) s"
  if [ "$code" != 0 ]; then failed="$failed $part($code)"; fi
done

{
  echo "# On real cards"
  echo
  "$python" -c "import sys; sys.path.insert(0, '$gpu'); import page; print(page.machine())"
  echo
  df -PT "$folder" | awk 'NR == 2 {print "Disk: " $2 ", " int($5 / 1048576) " GiB free."}'
  echo "Parts: $parts; $((SECONDS / 60)) min $((SECONDS % 60)) s.${failed:+ Failed:$failed.}"
  for part in $parts; do
    page="$folder/$(script_of "$part").md"
    echo
    case $(head -c 2 "$page" 2>/dev/null) in "# " | "##") ;; *) printf '## %s\n\n' "$part" ;; esac
    if [ -f "$page" ]; then cat "$page"; else echo "No page came out: see $folder/$part.log"; fi
  done
} >"$folder/results.md"
echo "== $folder/results.md"
if [ -n "$failed" ]; then
  echo "failed:$failed" >&2
  exit 1
fi
