"""The package from Python: a function for each training command, and `generate`.

    start.py      from arguments to a finished run; also used by the commands in `cli`
    training.py   train_sft, train_rm, train_dpo, train_kto, train_kd, train_prm, train_ppo
    generation.py generate
    keywords.py   the keyword arguments of these functions, for editors and type checkers
    arguments.py  datasets, reward functions and agents that are passed as objects
    result.py     what a run returns and what it reports after each step

Import them from `openrlhf`, as docs/python.md shows. Nothing here imports torch before a run starts.
"""
