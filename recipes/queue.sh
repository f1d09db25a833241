#!/usr/bin/env bash
# Train the papers' CIFAR-10 tables at full scale, one run after another, at low priority; start it again to resume.
# usage: recipes/queue.sh DATA_DIR [OUT]     a run takes about an hour on two idle cores; records go to OUT/records
set -euo pipefail
cd "$(dirname "$0")/.."
data=${1:?usage: recipes/queue.sh DATA_DIR [OUT]} out=${2:-recipes/results}

train() { # TABLE COLUMN SEEDS ROWS
  nice -n 19 "${UNSKEW:-.venv/bin/unskew}" reproduce "$1" --columns "$2" --seeds "$3" --rows "$4" \
    --scale paper --jobs 1 --data-dir "$data" --out "$out"
}

train ours/calibrations "α = 0.1" 0 "Prototypes*"
train ours/calibrations "α = 0.1" 0 "MOON*"
train ccvr/table2 "α = 0.1" 0 "FedAvgM*"
train ccvr/table2 "α = 0.1" 0 "FedProx*"
train ours/calibrations "α = 0.5" 0 "Prototypes*"
train ours/calibrations "α = 0.5" 0 "MOON*"
train ours/calibrations "α = 0.1" 1,2 "FedAvg*"
train ours/calibrations "α = 0.5" 1,2 "FedAvg*"
train ccvr/table2 "α = 0.5" 0 "*"
train ccvr/table2 "α = 0.05" 0 "*"
