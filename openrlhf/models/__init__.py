"""Loading, running and saving models, with their heads, layouts, attention and adapters."""

import logging

# Transformers imports bitsandbytes if it is installed, which then warns about kernels that the run may never use.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
