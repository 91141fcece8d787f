#!/usr/bin/env bash
# Installs this package with vLLM, Ray and DeepSpeed into the Python that is active, inside the container for example.
# Packages of NVIDIA's image that do not fit vLLM's PyTorch go first. EXTRAS chooses the extras.
set -euo pipefail

python3 -m pip uninstall --yes xgboost transformer_engine flash_attn pynvml
python3 -m pip install --editable "$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)[${EXTRAS:-vllm,liger,qlora,wandb,serve}]" "$@"
