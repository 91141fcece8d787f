#!/bin/bash
#SBATCH --job-name=openrlhf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# Runs a training script on several nodes. From this folder: sbatch train_llama_slurm.sh
# Set account, partition and nodes above or on the sbatch command line. Flags after the script name go to the command.
# Reinforcement learning runs on Ray, which train_ppo_ray_slurm.sh starts.
set -euo pipefail

readonly training_script=${TRAINING_SCRIPT:-train_sft_llama.sh}
readonly GPUS_PER_NODE=${GPUS_PER_NODE:-8}
readonly scripts=${SCRIPTS:-${SLURM_SUBMIT_DIR:-.}}

if [[ $training_script == train_ppo* || $training_script == train_reinforce* ]]; then
    flags=()
    if [[ $training_script == train_ppo_llama.sh ]]; then # it knows no nodes: all models share all devices
        flags=(--runtime ray --colocate_all_models)
        for role in actor ref critic reward; do
            flags+=("--${role}_num_nodes" "$SLURM_NNODES" "--${role}_num_gpus_per_node" "$GPUS_PER_NODE")
        done
    fi
    export TRAINING_SCRIPT=$training_script LAUNCHER="python3 -m"
    exec bash "$scripts/train_ppo_ray_slurm.sh" "${flags[@]}" "$@"
fi
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export LAUNCHER="torchrun --nnodes $SLURM_NNODES --nproc_per_node $GPUS_PER_NODE --rdzv_id $SLURM_JOB_ID \
    --rdzv_backend c10d --rdzv_endpoint $head:${MASTER_PORT:-29500} -m"
srun --nodes="$SLURM_NNODES" --ntasks-per-node=1 bash "$scripts/$training_script" "$@"
