#!/usr/bin/env bash
# A shell in a container with all GPUs and this repository as /openrlhf. In NVIDIA's PyTorch image, run build_openrlhf.sh
# first. For an image with everything: docker build --file dockerfile/Dockerfile --tag openrlhf . && IMAGE=openrlhf docker_run.sh
# Arguments run as a command instead of the shell. The container uses this account's Hugging Face cache and login.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ $# -gt 0 ] || set -- bash
docker run --runtime=nvidia --interactive --tty --rm --ipc=host --shm-size=10g --cap-add=SYS_ADMIN \
    --volume "$repository:/openrlhf" \
    --volume "${HF_HOME:-$HOME/.cache/huggingface}:/root/.cache/huggingface" \
    --workdir /openrlhf \
    "${IMAGE:-nvcr.io/nvidia/pytorch:25.11-py3}" "$@"
