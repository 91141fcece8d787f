"""Commands as they run.

Importing Transformers imports bitsandbytes where it is installed, which complains of kernels that a run may never use.
"""

import logging

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
