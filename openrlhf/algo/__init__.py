"""The mathematics of training: pure functions on tensors, without models, devices or clusters.

A rollout's rewards go through `shaping`, `kl` and `advantages` to `policy_loss` and `value_loss`; `token_loss` and
`preference_loss` serve the supervised commands. All losses reduce through `reduce`, whose denominators come from the
caller, so splitting a batch into micro-batches, ranks or packs never changes a gradient. `balance` splits by length.
Choices that a flag makes are plain dicts from its values to functions.
"""
