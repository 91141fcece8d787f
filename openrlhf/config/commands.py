"""The config of each command: its sections of flags, and its own defaults for some of them.

`COMMANDS` maps command names to configs. The docstrings of the configs are shown by `openrlhf --help`. A config is
frozen, and code receives it, or the sections it needs, unchanged; `flags.replace_flags` makes a changed copy.
"""

from dataclasses import dataclass

from openrlhf.config.flags import section
from openrlhf.config.sections.cluster import EngineFlags, PlacementFlags
from openrlhf.config.sections.data import (
    ConversationFlags,
    DatasetFlags,
    LabelledResponseFlags,
    PairFlags,
    StepFlags,
    TeacherResponseFlags,
    TemplateFlags,
)
from openrlhf.config.sections.inference import (
    BatchDataFlags,
    BatchTaskFlags,
    ChatFlags,
    MergeFlags,
    SamplingFlags,
    ServingFlags,
)
from openrlhf.config.sections.model import (
    LoadingFlags,
    LoraFlags,
    ModelFlags,
    PrecisionFlags,
    ReferenceFlags,
    ServedModelFlags,
    ValueHeadFlags,
)
from openrlhf.config.sections.objectives import (
    DirectPreferenceFlags,
    DistillationFlags,
    PairwiseRewardFlags,
    UnpairedPreferenceFlags,
)
from openrlhf.config.sections.rl import (
    AdvantageFlags,
    AsyncTrainingFlags,
    CriticFlags,
    KLControlFlags,
    PolicyLossFlags,
    PolicyOptimizerFlags,
    PromptFlags,
    RewardFlags,
    RolloutFlags,
)
from openrlhf.config.sections.training import (
    BatchFlags,
    CheckpointFlags,
    LogFlags,
    OptimizerFlags,
    RunFlags,
    ShardingFlags,
    SupervisedOptimizerFlags,
)

PLAIN_TEMPLATE = "User: {}\nAssistant: "


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Sections of every training command."""

    model: ModelFlags = section(ModelFlags)
    batches: BatchFlags = section(BatchFlags)
    optimizer: OptimizerFlags = section(OptimizerFlags)
    sharding: ShardingFlags = section(ShardingFlags)
    lora: LoraFlags = section(LoraFlags)
    checkpoints: CheckpointFlags = section(CheckpointFlags)
    logs: LogFlags = section(LogFlags)
    run: RunFlags = section(RunFlags)


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(TrainingConfig):
    """Sections of the six commands that train on a dataset."""

    data: DatasetFlags = section(DatasetFlags)
    optimizer: SupervisedOptimizerFlags = section(SupervisedOptimizerFlags)


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning, and continued pre-training with --pretrain_mode."""

    fields: ConversationFlags = section(ConversationFlags)
    template: TemplateFlags = section(TemplateFlags, input_template=PLAIN_TEMPLATE)
    batches: BatchFlags = section(BatchFlags, max_epochs=2)
    checkpoints: CheckpointFlags = section(CheckpointFlags, ckpt_path="./ckpt/checkpoints_sft")


@dataclass(frozen=True, kw_only=True)
class RMConfig(SupervisedConfig):
    """A reward model from pairs of responses."""

    data: DatasetFlags = section(DatasetFlags, max_len=512)
    fields: PairFlags = section(PairFlags)
    template: TemplateFlags = section(TemplateFlags)
    objective: PairwiseRewardFlags = section(PairwiseRewardFlags)
    head: ValueHeadFlags = section(ValueHeadFlags)
    batches: BatchFlags = section(BatchFlags, micro_train_batch_size=1)
    optimizer: SupervisedOptimizerFlags = section(SupervisedOptimizerFlags, learning_rate=9e-6)
    checkpoints: CheckpointFlags = section(CheckpointFlags, ckpt_path="./ckpt/checkpoints_rm")
    logs: LogFlags = section(LogFlags, wandb_project="openrlhf_train_rm", wandb_run_name="rm_%s")


@dataclass(frozen=True, kw_only=True)
class DPOConfig(SupervisedConfig):
    """Direct preference optimisation: DPO, IPO and cDPO."""

    data: DatasetFlags = section(DatasetFlags, max_len=512, eval_split="test")
    fields: PairFlags = section(PairFlags)
    template: TemplateFlags = section(TemplateFlags)
    objective: DirectPreferenceFlags = section(DirectPreferenceFlags)
    reference: ReferenceFlags = section(ReferenceFlags)
    optimizer: SupervisedOptimizerFlags = section(SupervisedOptimizerFlags, learning_rate=1e-5)
    checkpoints: CheckpointFlags = section(CheckpointFlags, ckpt_path="./ckpt/checkpoints_dpo")
    logs: LogFlags = section(LogFlags, wandb_project="openrlhf_train_dpo", wandb_run_name="exp_%s")


@dataclass(frozen=True, kw_only=True)
class KTOConfig(SupervisedConfig):
    """Preference learning from single responses with a label (KTO)."""

    model: ModelFlags = section(ModelFlags, pretrain="bigscience/bloomz-1b7")
    data: DatasetFlags = section(DatasetFlags, eval_split="test")
    fields: LabelledResponseFlags = section(LabelledResponseFlags)
    template: TemplateFlags = section(TemplateFlags, input_template=PLAIN_TEMPLATE)
    objective: UnpairedPreferenceFlags = section(UnpairedPreferenceFlags)
    reference: ReferenceFlags = section(ReferenceFlags)
    optimizer: SupervisedOptimizerFlags = section(SupervisedOptimizerFlags, learning_rate=1e-5)
    checkpoints: CheckpointFlags = section(CheckpointFlags, ckpt_path="./ckpt/checkpoints_kto")
    logs: LogFlags = section(LogFlags, wandb_project="openrlhf_train_dpo", wandb_run_name="rm_%s")


@dataclass(frozen=True, kw_only=True)
class KDConfig(SupervisedConfig):
    """Knowledge distillation from a teacher model."""

    data: DatasetFlags = section(DatasetFlags, eval_split="test")
    fields: TeacherResponseFlags = section(TeacherResponseFlags, output_key="output")
    template: TemplateFlags = section(TemplateFlags, input_template=PLAIN_TEMPLATE)
    objective: DistillationFlags = section(DistillationFlags)
    checkpoints: CheckpointFlags = section(CheckpointFlags, ckpt_path="./ckpt/checkpoints_kd")


@dataclass(frozen=True, kw_only=True)
class PRMConfig(SupervisedConfig):
    """A process reward model from steps with labels."""

    data: DatasetFlags = section(DatasetFlags, eval_split="test")
    fields: StepFlags = section(StepFlags)
    batches: BatchFlags = section(BatchFlags, micro_train_batch_size=1)
    optimizer: SupervisedOptimizerFlags = section(SupervisedOptimizerFlags, learning_rate=1e-6)
    checkpoints: CheckpointFlags = section(CheckpointFlags, ckpt_path="./ckpt/checkpoints_prm")
    logs: LogFlags = section(LogFlags, wandb_project="openrlhf_train_prm", wandb_run_name="prm_%s")


@dataclass(frozen=True, kw_only=True)
class RLConfig(TrainingConfig):
    """Reinforcement learning: PPO, REINFORCE++, RLOO, GRPO, Dr. GRPO; single- and multi-turn agents."""

    prompts: PromptFlags = section(PromptFlags)
    template: TemplateFlags = section(TemplateFlags)
    rollout: RolloutFlags = section(RolloutFlags)
    asynchrony: AsyncTrainingFlags = section(AsyncTrainingFlags)
    rewards: RewardFlags = section(RewardFlags)
    advantage: AdvantageFlags = section(AdvantageFlags)
    kl: KLControlFlags = section(KLControlFlags)
    policy: PolicyLossFlags = section(PolicyLossFlags)
    critic: CriticFlags = section(CriticFlags)
    head: ValueHeadFlags = section(ValueHeadFlags)
    placement: PlacementFlags = section(PlacementFlags)
    engines: EngineFlags = section(EngineFlags)
    batches: BatchFlags = section(BatchFlags, micro_train_batch_size=4)
    optimizer: PolicyOptimizerFlags = section(PolicyOptimizerFlags)
    checkpoints: CheckpointFlags = section(
        CheckpointFlags, ckpt_path="./ckpt/checkpoints_ppo_ray", max_ckpt_mem=float("inf")
    )
    logs: LogFlags = section(LogFlags, wandb_project="openrlhf_train_ppo", wandb_run_name="ppo_%s")


@dataclass(frozen=True, kw_only=True)
class LocalRLConfig(RLConfig):
    """Reinforcement learning in one process without Ray; under deepspeed or torchrun, on one device per process."""

    placement: PlacementFlags = section(PlacementFlags, runtime="local")


@dataclass(frozen=True, kw_only=True)
class BatchInferenceConfig:
    """Generate, score and post-process over whole datasets."""

    task: BatchTaskFlags = section(BatchTaskFlags)
    model: ServedModelFlags = section(ServedModelFlags)
    head: ValueHeadFlags = section(ValueHeadFlags)
    data: BatchDataFlags = section(BatchDataFlags)
    template: TemplateFlags = section(TemplateFlags)
    sampling: SamplingFlags = section(SamplingFlags)


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Chat with a model."""

    model: ServedModelFlags = section(ServedModelFlags)
    chat: ChatFlags = section(ChatFlags)
    template: TemplateFlags = section(TemplateFlags, input_template=PLAIN_TEMPLATE)
    sampling: SamplingFlags = section(SamplingFlags, temperature=0.2, top_p=0.9, repetition_penalty=1.2)


@dataclass(frozen=True, kw_only=True)
class ServeRMConfig:
    """Serve a reward model over HTTP."""

    server: ServingFlags = section(ServingFlags)
    head: ValueHeadFlags = section(ValueHeadFlags)
    model: LoadingFlags = section(LoadingFlags)


@dataclass(frozen=True, kw_only=True)
class LoraCombinerConfig:
    """Merge a LoRA adapter into its base model."""

    merge: MergeFlags = section(MergeFlags)
    model: PrecisionFlags = section(PrecisionFlags)


Templated = SFTConfig | RMConfig | DPOConfig | KTOConfig | KDConfig | RLConfig | BatchInferenceConfig | ChatConfig

COMMANDS: dict[str, type] = {
    "train_sft": SFTConfig,
    "train_rm": RMConfig,
    "train_dpo": DPOConfig,
    "train_kto": KTOConfig,
    "train_kd": KDConfig,
    "train_prm": PRMConfig,
    "train_ppo": LocalRLConfig,
    "train_ppo_ray": RLConfig,
    "batch_inference": BatchInferenceConfig,
    "interactive_chat": ChatConfig,
    "serve_rm": ServeRMConfig,
    "lora_combiner": LoraCombinerConfig,
}
