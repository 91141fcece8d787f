"""Implementation of the commands: each turns a checked config into a finished run.

The modules in `openrlhf.cli` parse and check flags, then call `run` in `supervised`, `rl`, `batch_inference`, `chat`,
`serve` or `merge`. These modules build models, data and engines, and leave the training loops to `openrlhf.training`
and `openrlhf.rl`.
"""

import logging

# Transformers imports bitsandbytes if it is installed, and bitsandbytes then warns about kernels the run may never use.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
