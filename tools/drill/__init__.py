"""Drills: break runs on purpose, thousands of times if you like, and count what is lost. `make drill` runs all of them.

`__main__.py` chooses the drills and prints the table; `outcome.py` defines the result of a drill; `programs.py` starts,
kills and finds the processes of a run; `rl_runs.py` is the small RL run that most drills break. Every other module is
one drill or a few of a kind.
"""
