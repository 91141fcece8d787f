#!/usr/bin/env bash
# A shell in a container with all GPUs, this repository as /openrlhf. NVIDIA's PyTorch image needs build_openrlhf.sh in it;
# an image with everything: docker build --file dockerfile/Dockerfile --tag openrlhf . && IMAGE=openrlhf docker_run.sh
# Words behind the name run in place of the shell. Hugging Face's cache and login are those of this account.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
[ $# -gt 0 ] || set -- bash
docker run --runtime=nvidia --interactive --tty --rm --ipc=host --shm-size=10g --cap-add=SYS_ADMIN \
    --volume "$repository:/openrlhf" \
    --volume "${HF_HOME:-$HOME/.cache/huggingface}:/root/.cache/huggingface" \
    --workdir /openrlhf \
    "${IMAGE:-nvcr.io/nvidia/pytorch:25.11-py3}" "$@"
