#!/usr/bin/env bash
# A shell in a container with all GPUs and this repository as /openrlhf. In NVIDIA's PyTorch image, run build_openrlhf.sh
# first. For an image with everything: docker build --file dockerfile/Dockerfile --tag openrlhf . && IMAGE=openrlhf docker_run.sh
# Arguments run as a command instead of the shell.
#
# The container uses this account's Hugging Face cache, but not its login: HF_LOGIN=1 passes the token on, read-only.
# SHM_SIZE is the size of its own shared memory. The seccomp profile lets the sandbox for code rewards create user
# namespaces without SYS_ADMIN; Docker's AppArmor profile would forbid its mounts, so the container has none.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cache=${HF_HOME:-$HOME/.cache/huggingface}
inside=/root/.cache/huggingface
mkdir -p "$cache/hub" "$cache/datasets"
login=()
if [ "${HF_LOGIN:-0}" = 1 ]; then
    login=(--volume "$cache/token:$inside/token:ro")
fi
[ $# -gt 0 ] || set -- bash
docker run --runtime=nvidia --interactive --tty --rm --shm-size="${SHM_SIZE:-16g}" \
    --security-opt "seccomp=$repository/dockerfile/seccomp.json" \
    --security-opt apparmor=unconfined \
    --security-opt no-new-privileges \
    --volume "$repository:/openrlhf" \
    --volume "$cache/hub:$inside/hub" \
    --volume "$cache/datasets:$inside/datasets" \
    ${login[@]+"${login[@]}"} \
    --workdir /openrlhf \
    "${IMAGE:-nvcr.io/nvidia/pytorch:25.11-py3}" "$@"
