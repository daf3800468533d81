#!/bin/sh
# On a machine with two cards: is every saved byte right, and what do saves cost? About 15 minutes and 60 GB of disk.
#
#   benchmarks/gpu/run.sh [FOLDER]        on the disk that is to be measured; default: build/gpu
#
# Peers that are installed take part: pip install torch_checkpointing nvidia-resiliency-ext torchsnapshot
set -eu
cd "$(dirname "$0")/../.."
folder=${1:-build/gpu}
python=${PYTHON:-python3}
mkdir -p "$folder"
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
torchrun="$python -W ignore -m torch.distributed.run --standalone --nproc-per-node 2"
$torchrun benchmarks/gpu/check_bytes.py "$folder/bytes"
rm -rf "$folder/bytes"
$torchrun benchmarks/checkpoint.py --dim 4096 --layers 8 --batch 24 --rounds 4 --limit-s "${LIMIT_S:-420}" --dir "$folder" --out "$folder"
cat "$folder/checkpoint.md"
