"""One hypothesis profile for the mathematics: the same examples on every run, no deadline on a busy machine."""

from hypothesis import settings

settings.register_profile("algo", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("algo")
