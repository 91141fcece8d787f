"""Worker processes that run user code, and the event loop that talks to them."""
