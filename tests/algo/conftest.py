"""Hypothesis settings: the same examples in every run, and no deadline, since the machine may be busy."""

from hypothesis import settings

settings.register_profile("algo", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("algo")
