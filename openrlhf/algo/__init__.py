"""The mathematics of training: pure functions on tensors, without models, devices or clusters.

`shaping`, `kl` and `advantages` turn the rewards of a rollout into advantages for `policy_loss` and `value_loss`.
`token_loss` and `preference_loss` are for the supervised commands. All losses use the reductions in `reduce` and take
their denominator as an argument, so splitting a batch into micro-batches, ranks or packs never changes a gradient.
`balance` splits batches by length. Flags that select an algorithm are looked up in plain dicts of functions.
"""
