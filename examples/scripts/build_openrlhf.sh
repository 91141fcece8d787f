#!/usr/bin/env bash
# Installs this package with vLLM, Ray and DeepSpeed into the active Python, for example inside the container.
# NVIDIA's PyTorch images pin their own PyTorch, and vLLM needs another: this lifts the pin and uninstalls the packages
# that were compiled against the image's PyTorch. EXTRAS selects the extras.
set -euo pipefail

unset PIP_CONSTRAINT
python3 -m pip uninstall --yes xgboost transformer_engine flash_attn pynvml
python3 -m pip install --editable "$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)[${EXTRAS:-vllm,liger,qlora,wandb,serve}]" "$@"
