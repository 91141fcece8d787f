"""What every test relies on."""

import signal

# A shell starts background jobs deaf to Ctrl-C, and children inherit that: tests that send it must be heard.
signal.signal(signal.SIGINT, signal.default_int_handler)
