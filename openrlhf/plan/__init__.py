"""What a run needs before it starts: memory by device and phase, and seconds by phase.

Everything here is arithmetic on frozen dataclasses: `config/workload.py` reduces the flags to a `Workload`, `shapes.py`
reads the sizes of a model from its config.json, and `gpus.py` knows the GPUs. `estimate.py` combines them.
"""
