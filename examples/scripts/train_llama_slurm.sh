#!/bin/bash
#SBATCH --job-name=openrlhf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# A supervised training script on several nodes, from this folder: sbatch train_llama_slurm.sh
# Account, partition and nodes: change the lines above or give them to sbatch. Flags behind the name go to the command.
# Reinforcement learning: train_ppo_ray_slurm.sh.
set -euo pipefail

readonly training_script=${TRAINING_SCRIPT:-train_sft_llama.sh}
readonly GPUS_PER_NODE=${GPUS_PER_NODE:-8}
readonly scripts=${SCRIPTS:-${SLURM_SUBMIT_DIR:-.}}

if [[ $training_script == train_ppo* || $training_script == train_reinforce* ]]; then
    echo "$training_script runs on several nodes through Ray: sbatch train_ppo_ray_slurm.sh" >&2
    exit 1
fi
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export LAUNCHER="torchrun --nnodes $SLURM_NNODES --nproc_per_node $GPUS_PER_NODE --rdzv_id $SLURM_JOB_ID \
    --rdzv_backend c10d --rdzv_endpoint $head:${MASTER_PORT:-29500} -m"
srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 bash "$scripts/$training_script" "$@"
