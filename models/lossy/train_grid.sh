#!/usr/bin/env bash
# Trains every model of docs/results/lossy-memento.md: bash models/lossy/train_grid.sh FOLDER [DEVICE [AT_ONCE]]
# On a GPU eight at a time take minutes; on two cores a model takes 5 to 40 minutes. Interrupted, the same command goes on.
set -euo pipefail
folder=$1 device=${2:-cpu} at_once=${3:-1}
for seed in 0 1; do
  for slots in 1 3 5; do
    for asked in 1 2 4 8 16 32 48; do
      echo "--asked $asked --slots $slots --seed $seed"
    done
  done
  for design in "--asked 8 --slots 3" "--asked 16 --slots 1"; do
    echo "$design --seed $seed --provenance recomputed"
  done
done | OMP_NUM_THREADS=1 xargs -P "$at_once" -I{} sh -c "${PYTHON:-python} -m kvprobe train lossy {} --device $device --out '$folder' >/dev/null 2>&1 || echo 'failed: {}'"
