"""The config of each command: its sections of flags, and its own defaults for some of them.

`COMMANDS` maps command names to configs. The docstrings of the configs are shown by `openrlhf --help`.
"""

from dataclasses import dataclass

from openrlhf.config.flags import section
from openrlhf.config.sections.cluster import Engines, Placement
from openrlhf.config.sections.data import (
    Conversations,
    Dataset,
    LabelledResponses,
    Pairs,
    Steps,
    TeacherResponses,
    Template,
)
from openrlhf.config.sections.inference import BatchData, BatchTask, Chat, Merge, Sampling, Serving
from openrlhf.config.sections.model import Loading, Lora, Model, Precision, Reference, ServedModel, ValueHead
from openrlhf.config.sections.objectives import DirectPreference, Distillation, PairwiseReward, UnpairedPreference
from openrlhf.config.sections.rl import (
    Advantage,
    AsyncTraining,
    Critic,
    KLControl,
    PolicyLoss,
    PolicyOptimizer,
    Prompts,
    Rewards,
    Rollout,
)
from openrlhf.config.sections.training import (
    Batches,
    Checkpoints,
    Logs,
    Optimizer,
    Run,
    Sharding,
    SupervisedOptimizer,
)

PLAIN_TEMPLATE = "User: {}\nAssistant: "


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Sections of every training command."""

    model: Model = section(Model)
    batches: Batches = section(Batches)
    optimizer: Optimizer = section(Optimizer)
    sharding: Sharding = section(Sharding)
    lora: Lora = section(Lora)
    checkpoints: Checkpoints = section(Checkpoints)
    logs: Logs = section(Logs)
    run: Run = section(Run)


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(TrainingConfig):
    """Sections of the six commands that train on a dataset."""

    data: Dataset = section(Dataset)
    optimizer: SupervisedOptimizer = section(SupervisedOptimizer)


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    """Supervised fine-tuning, and continued pre-training with --pretrain_mode."""

    fields: Conversations = section(Conversations)
    template: Template = section(Template, input_template=PLAIN_TEMPLATE)
    batches: Batches = section(Batches, max_epochs=2)
    checkpoints: Checkpoints = section(Checkpoints, ckpt_path="./ckpt/checkpoints_sft")


@dataclass(frozen=True, kw_only=True)
class RMConfig(SupervisedConfig):
    """A reward model from pairs of responses."""

    data: Dataset = section(Dataset, max_len=512)
    fields: Pairs = section(Pairs)
    template: Template = section(Template)
    objective: PairwiseReward = section(PairwiseReward)
    head: ValueHead = section(ValueHead)
    batches: Batches = section(Batches, micro_train_batch_size=1)
    optimizer: SupervisedOptimizer = section(SupervisedOptimizer, learning_rate=9e-6)
    checkpoints: Checkpoints = section(Checkpoints, ckpt_path="./ckpt/checkpoints_rm")
    logs: Logs = section(Logs, wandb_project="openrlhf_train_rm", wandb_run_name="rm_%s")


@dataclass(frozen=True, kw_only=True)
class DPOConfig(SupervisedConfig):
    """Direct preference optimisation: DPO, IPO and cDPO."""

    data: Dataset = section(Dataset, max_len=512, eval_split="test")
    fields: Pairs = section(Pairs)
    template: Template = section(Template)
    objective: DirectPreference = section(DirectPreference)
    reference: Reference = section(Reference)
    optimizer: SupervisedOptimizer = section(SupervisedOptimizer, learning_rate=1e-5)
    checkpoints: Checkpoints = section(Checkpoints, ckpt_path="./ckpt/checkpoints_dpo")
    logs: Logs = section(Logs, wandb_project="openrlhf_train_dpo", wandb_run_name="exp_%s")


@dataclass(frozen=True, kw_only=True)
class KTOConfig(SupervisedConfig):
    """Preference learning from single responses with a label (KTO)."""

    model: Model = section(Model, pretrain="bigscience/bloomz-1b7")
    data: Dataset = section(Dataset, eval_split="test")
    fields: LabelledResponses = section(LabelledResponses)
    template: Template = section(Template, input_template=PLAIN_TEMPLATE)
    objective: UnpairedPreference = section(UnpairedPreference)
    reference: Reference = section(Reference)
    optimizer: SupervisedOptimizer = section(SupervisedOptimizer, learning_rate=1e-5)
    checkpoints: Checkpoints = section(Checkpoints, ckpt_path="./ckpt/checkpoints_kto")
    logs: Logs = section(Logs, wandb_project="openrlhf_train_dpo", wandb_run_name="rm_%s")


@dataclass(frozen=True, kw_only=True)
class KDConfig(SupervisedConfig):
    """Knowledge distillation from a teacher model."""

    data: Dataset = section(Dataset, eval_split="test")
    fields: TeacherResponses = section(TeacherResponses, output_key="output")
    template: Template = section(Template, input_template=PLAIN_TEMPLATE)
    objective: Distillation = section(Distillation)
    checkpoints: Checkpoints = section(Checkpoints, ckpt_path="./ckpt/checkpoints_kd")


@dataclass(frozen=True, kw_only=True)
class PRMConfig(SupervisedConfig):
    """A process reward model from steps with labels."""

    data: Dataset = section(Dataset, eval_split="test")
    fields: Steps = section(Steps)
    batches: Batches = section(Batches, micro_train_batch_size=1)
    optimizer: SupervisedOptimizer = section(SupervisedOptimizer, learning_rate=1e-6)
    checkpoints: Checkpoints = section(Checkpoints, ckpt_path="./ckpt/checkpoints_prm")
    logs: Logs = section(Logs, wandb_project="openrlhf_train_prm", wandb_run_name="prm_%s")


@dataclass(frozen=True, kw_only=True)
class RLConfig(TrainingConfig):
    """Reinforcement learning: PPO, REINFORCE++, RLOO, GRPO, Dr. GRPO; single- and multi-turn agents."""

    prompts: Prompts = section(Prompts)
    template: Template = section(Template)
    rollout: Rollout = section(Rollout)
    asynchrony: AsyncTraining = section(AsyncTraining)
    rewards: Rewards = section(Rewards)
    advantage: Advantage = section(Advantage)
    kl: KLControl = section(KLControl)
    policy: PolicyLoss = section(PolicyLoss)
    critic: Critic = section(Critic)
    head: ValueHead = section(ValueHead)
    placement: Placement = section(Placement)
    engines: Engines = section(Engines)
    batches: Batches = section(Batches, micro_train_batch_size=4)
    optimizer: PolicyOptimizer = section(PolicyOptimizer)
    checkpoints: Checkpoints = section(Checkpoints, ckpt_path="./ckpt/checkpoints_ppo_ray", max_ckpt_mem=float("inf"))
    logs: Logs = section(Logs, wandb_project="openrlhf_train_ppo", wandb_run_name="ppo_%s")


@dataclass(frozen=True, kw_only=True)
class LocalRLConfig(RLConfig):
    """Reinforcement learning in one process without Ray; under deepspeed or torchrun, on one device per process."""

    placement: Placement = section(Placement, runtime="local")


@dataclass(frozen=True, kw_only=True)
class BatchInferenceConfig:
    """Generate, score and post-process over whole datasets."""

    task: BatchTask = section(BatchTask)
    model: ServedModel = section(ServedModel)
    head: ValueHead = section(ValueHead)
    data: BatchData = section(BatchData)
    template: Template = section(Template)
    sampling: Sampling = section(Sampling)


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Talk to a model."""

    model: ServedModel = section(ServedModel)
    chat: Chat = section(Chat)
    template: Template = section(Template, input_template=PLAIN_TEMPLATE)
    sampling: Sampling = section(Sampling, temperature=0.2, top_p=0.9, repetition_penalty=1.2)


@dataclass(frozen=True, kw_only=True)
class ServeRMConfig:
    """Serve a reward model over HTTP."""

    server: Serving = section(Serving)
    head: ValueHead = section(ValueHead)
    model: Loading = section(Loading)


@dataclass(frozen=True, kw_only=True)
class LoraCombinerConfig:
    """Merge a LoRA adapter into its base model."""

    merge: Merge = section(Merge)
    model: Precision = section(Precision)


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
