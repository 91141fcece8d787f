"""Convert the optimizer flags into the settings that the training backends take."""

from openrlhf.config.sections.training import OptimizerFlags
from openrlhf.training.optim import OptimizerSettings


def optimizer_settings(flags: OptimizerFlags, learning_rate: float) -> OptimizerSettings:
    return OptimizerSettings(
        learning_rate=learning_rate,
        optim=flags.optim,
        weight_decay=flags.l2,
        betas=flags.adam_betas,
        eps=flags.adam_eps,
        max_norm=flags.max_norm,
        muon_lr=flags.muon_lr,
        muon_momentum=flags.muon_momentum,
        muon_ns_steps=flags.muon_ns_steps,
        muon_nesterov=flags.muon_nesterov,
    )
