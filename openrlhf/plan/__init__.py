"""Predict the memory of a run by device and phase, and its seconds by phase, before it starts.

Everything here is arithmetic on frozen dataclasses: `config/workload.py` reduces the flags to a `Workload`, `shapes.py`
reads the sizes of a model from its config.json, and `gpus.py` knows the GPUs. `estimate.py` combines them.
"""
