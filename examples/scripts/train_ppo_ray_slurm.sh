#!/bin/bash
#SBATCH --job-name=openrlhf-rl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Runs a Ray script on several nodes. From this folder: sbatch train_ppo_ray_slurm.sh
# Starts one Ray node on each Slurm node, then runs the script on the first. Set account, partition and nodes above or on
# the sbatch command line. Flags after the script name go to the command. Output paths must be on a shared file system.
set -euo pipefail

readonly training_script=${TRAINING_SCRIPT:-train_ppo_ray_hybrid_engine.sh}
readonly GPUS_PER_NODE=${GPUS_PER_NODE:-8}
readonly RAY_PORT=${RAY_PORT:-6379}
readonly scripts=${SCRIPTS:-${SLURM_SUBMIT_DIR:-.}}
export ENGINE_TP=${ENGINE_TP:-2}
export ACTOR_NODES=${ACTOR_NODES:-$SLURM_NNODES} ACTOR_GPUS=${ACTOR_GPUS:-$GPUS_PER_NODE}
export ENGINES=${ENGINES:-$((SLURM_NNODES * GPUS_PER_NODE / ENGINE_TP))}

# Anyone who can reach a Ray port can run code, so all nodes share a secret.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$HOME/ray_token}
if [ ! -s "$RAY_AUTH_TOKEN_PATH" ]; then
    (umask 077 && python3 -c "import secrets; print(secrets.token_hex(32), end='')" > "$RAY_AUTH_TOKEN_PATH")
fi

read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
readonly head address="$head:$RAY_PORT" others=$((SLURM_NNODES - 1))

on_head() {
    srun --nodes=1 --ntasks=1 --overlap --nodelist="$head" "$@"
}

nodes_are_there() {
    [ "$(on_head ray status --address "$address" 2> /dev/null | grep -c ' node_')" -ge "$1" ]
}

wait_for_nodes() {
    for _ in {1..100}; do
        if nodes_are_there "$1"; then return; fi
        sleep 3
    done
    echo "after five minutes Ray at $address has not $1 node(s)" >&2
    exit 1
}

trap 'kill $(jobs -p) 2> /dev/null || true' EXIT
on_head ray start --head --port "$RAY_PORT" --block &
wait_for_nodes 1
if [ "$others" -gt 0 ]; then
    srun --nodes="$others" --ntasks="$others" --overlap --exclude="$head" ray start --address "$address" --block &
    wait_for_nodes "$SLURM_NNODES"
fi
RAY_ADDRESS=$address on_head bash "$scripts/$training_script" "$@"
