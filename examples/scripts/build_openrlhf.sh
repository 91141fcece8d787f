#!/usr/bin/env bash
# Installs this package with vLLM, Ray and DeepSpeed into the Python that is active, inside the container for example.
# NVIDIA's image pins its own PyTorch, and vLLM brings another: the pin is lifted and what was compiled against the
# image's goes. EXTRAS chooses the extras.
set -euo pipefail

unset PIP_CONSTRAINT
python3 -m pip uninstall --yes xgboost transformer_engine flash_attn pynvml
python3 -m pip install --editable "$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)[${EXTRAS:-vllm,liger,qlora,wandb,serve}]" "$@"
