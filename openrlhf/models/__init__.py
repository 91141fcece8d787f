"""Loading, running and saving models: heads, layouts, attention, adapters."""

import logging

# Transformers imports bitsandbytes if it is installed, and bitsandbytes then warns about kernels the run may never use.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
