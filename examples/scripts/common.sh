# Functions and settings shared by the scripts, which source this file.
#
#   launch COMMAND FLAG...         one process per device of this machine. LAUNCHER replaces `deepspeed --module`:
#                                  LAUNCHER="deepspeed --num_gpus 2 --module", LAUNCHER="python3 -m" (one process), torchrun
#   train_ppo_ray FLAG...          RAY_ADDRESS=http://HOST:8265 submits the run to that cluster with `ray job submit`,
#                                  together with the current folder. Otherwise the command runs here: it joins the Ray
#                                  at RAY_ADDRESS=HOST:PORT or the one that `ray start` started on this machine, or else
#                                  starts its own (docs/cluster.md).
# shellcheck shell=bash
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck disable=SC2034  # used by the scripts that source this
examples=$(dirname "$scripts")

launch() {
    local launcher
    read -ra launcher <<< "${LAUNCHER:-deepspeed --module}"
    "${launcher[@]}" "openrlhf.cli.$1" "${@:2}"
}

train_ppo_ray() {
    local command=(python3 -m openrlhf.cli.train_ppo_ray "$@")
    case ${RAY_ADDRESS:-} in
        http*) ray job submit --address "$RAY_ADDRESS" --working-dir "$PWD" -- "${command[@]}" ;;
        *) "${command[@]}" ;;
    esac
}
