#!/usr/bin/env bash
# Installs NVIDIA's container toolkit from NVIDIA's repository, so that Docker on Debian and Ubuntu can use GPUs. Docker
# and the GPU driver must already be installed.
set -euo pipefail

readonly packages=https://nvidia.github.io/libnvidia-container
readonly keyring=/usr/share/keyrings/nvidia-container-toolkit-keyring.gpg

for needed in docker nvidia-smi curl gpg; do
    command -v "$needed" > /dev/null || { echo "$needed is not there: install it first" >&2; exit 1; }
done
curl -fsSL "$packages/gpgkey" | sudo gpg --dearmor --yes --output "$keyring"
curl -fsSL "$packages/stable/deb/nvidia-container-toolkit.list" |
    sed "s#deb https://#deb [signed-by=$keyring] https://#" |
    sudo tee /etc/apt/sources.list.d/nvidia-container-toolkit.list > /dev/null
sudo apt-get update
sudo apt-get install --yes nvidia-container-toolkit
sudo nvidia-ctk runtime configure --runtime=docker
sudo systemctl restart docker
docker run --rm --runtime=nvidia "${IMAGE:-ubuntu}" nvidia-smi
