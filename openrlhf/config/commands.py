"""The config of each command: its sections of flags, and the defaults that differ for this command.

`COMMANDS` maps command names to configs. The docstring of a config is its help: the first line describes the command in
`openrlhf --help`, and the rest is a typical command line, which the tests run through the parser and the checks. A
config is frozen; use `flags.replace_flags` to make a changed copy.
"""

from dataclasses import dataclass

from openrlhf.config.flags import section
from openrlhf.config.sections import algorithm, cluster, inference, objectives, rl, setup, training, view

# Configs have fields called `data`, `export` and `model`, so the sections of these modules are imported by name.
from openrlhf.config.sections.data import (
    ConversationFlags,
    DatasetFlags,
    LabelledResponseFlags,
    PairFlags,
    StepFlags,
    TeacherResponseFlags,
    TemplateFlags,
)
from openrlhf.config.sections.export import ExportFlags, HubFlags
from openrlhf.config.sections.model import (
    LoadingFlags,
    LoraFlags,
    ModelFlags,
    PrecisionFlags,
    ReferenceFlags,
    ServedModelFlags,
    ValueHeadFlags,
)

PLAIN_TEMPLATE = "User: {}\nAssistant: "


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Sections of every training command."""

    model: ModelFlags = section(ModelFlags)
    batches: training.BatchFlags = section(training.BatchFlags)
    optimizer: training.OptimizerFlags = section(training.OptimizerFlags)
    sharding: training.ShardingFlags = section(training.ShardingFlags)
    lora: LoraFlags = section(LoraFlags)
    checkpoints: training.CheckpointFlags = section(training.CheckpointFlags)
    hub: HubFlags = section(HubFlags)
    logs: training.LogFlags = section(training.LogFlags)
    run: training.RunFlags = section(training.RunFlags)


@dataclass(frozen=True, kw_only=True)
class SupervisedConfig(TrainingConfig):
    """Sections of the six commands that train on a dataset."""

    data: DatasetFlags = section(DatasetFlags)
    optimizer: training.SupervisedOptimizerFlags = section(training.SupervisedOptimizerFlags)


@dataclass(frozen=True, kw_only=True)
class SFTConfig(SupervisedConfig):
    r"""Supervised fine-tuning, and continued pre-training with --pretrain_mode.

    openrlhf train_sft --pretrain ./model --dataset ./chats.jsonl --input_key messages --apply_chat_template \
        --multiturn --max_len 2048 --packing_samples --learning_rate 1e-5 --max_epochs 2 --save_path ./sft
    """

    fields: ConversationFlags = section(ConversationFlags)
    template: TemplateFlags = section(TemplateFlags, input_template=PLAIN_TEMPLATE)
    batches: training.BatchFlags = section(training.BatchFlags, max_epochs=2)
    checkpoints: training.CheckpointFlags = section(training.CheckpointFlags, ckpt_path="./ckpt/checkpoints_sft")


@dataclass(frozen=True, kw_only=True)
class RMConfig(SupervisedConfig):
    r"""Train a reward model on pairs of responses.

    openrlhf train_rm --pretrain ./sft --dataset ./pairs.jsonl --prompt_key prompt --apply_chat_template \
        --max_len 2048 --packing_samples --learning_rate 9e-6 --max_epochs 1 --save_path ./rm
    """

    data: DatasetFlags = section(DatasetFlags, max_len=512)
    fields: PairFlags = section(PairFlags)
    template: TemplateFlags = section(TemplateFlags)
    objective: objectives.PairwiseRewardFlags = section(objectives.PairwiseRewardFlags)
    head: ValueHeadFlags = section(ValueHeadFlags)
    batches: training.BatchFlags = section(training.BatchFlags, micro_train_batch_size=1)
    optimizer: training.SupervisedOptimizerFlags = section(training.SupervisedOptimizerFlags, learning_rate=9e-6)
    checkpoints: training.CheckpointFlags = section(training.CheckpointFlags, ckpt_path="./ckpt/checkpoints_rm")
    logs: training.LogFlags = section(training.LogFlags, wandb_project="openrlhf_train_rm", wandb_run_name="rm_%s")


@dataclass(frozen=True, kw_only=True)
class DPOConfig(SupervisedConfig):
    r"""Direct preference optimisation: DPO, IPO and cDPO.

    openrlhf train_dpo --pretrain ./sft --dataset ./pairs.jsonl --prompt_key prompt --apply_chat_template \
        --beta 0.1 --learning_rate 5e-7 --max_len 2048 --packing_samples --save_path ./dpo
    """

    data: DatasetFlags = section(DatasetFlags, max_len=512, eval_split="test")
    fields: PairFlags = section(PairFlags)
    template: TemplateFlags = section(TemplateFlags)
    objective: objectives.DirectPreferenceFlags = section(objectives.DirectPreferenceFlags)
    reference: ReferenceFlags = section(ReferenceFlags)
    optimizer: training.SupervisedOptimizerFlags = section(training.SupervisedOptimizerFlags, learning_rate=1e-5)
    checkpoints: training.CheckpointFlags = section(training.CheckpointFlags, ckpt_path="./ckpt/checkpoints_dpo")
    logs: training.LogFlags = section(training.LogFlags, wandb_project="openrlhf_train_dpo", wandb_run_name="exp_%s")


@dataclass(frozen=True, kw_only=True)
class KTOConfig(SupervisedConfig):
    r"""Preference optimisation from single labelled responses (KTO).

    openrlhf train_kto --pretrain ./sft --dataset ./labelled.jsonl --input_key prompt --output_key response \
        --label_key label --beta 0.1 --learning_rate 5e-7 --max_len 2048 --save_path ./kto
    """

    model: ModelFlags = section(ModelFlags, pretrain="bigscience/bloomz-1b7")
    data: DatasetFlags = section(DatasetFlags, eval_split="test")
    fields: LabelledResponseFlags = section(LabelledResponseFlags)
    template: TemplateFlags = section(TemplateFlags, input_template=PLAIN_TEMPLATE)
    objective: objectives.UnpairedPreferenceFlags = section(objectives.UnpairedPreferenceFlags)
    reference: ReferenceFlags = section(ReferenceFlags)
    optimizer: training.SupervisedOptimizerFlags = section(training.SupervisedOptimizerFlags, learning_rate=1e-5)
    checkpoints: training.CheckpointFlags = section(training.CheckpointFlags, ckpt_path="./ckpt/checkpoints_kto")
    logs: training.LogFlags = section(training.LogFlags, wandb_project="openrlhf_train_dpo", wandb_run_name="rm_%s")


@dataclass(frozen=True, kw_only=True)
class KDConfig(SupervisedConfig):
    r"""Knowledge distillation from a teacher model.

    openrlhf train_kd --pretrain ./student --teacher_model ./teacher --dataset ./answers.jsonl \
        --input_key question --output_key answer --kd_coef 0.4 --learning_rate 1e-5 --save_path ./kd
    """

    data: DatasetFlags = section(DatasetFlags, eval_split="test")
    fields: TeacherResponseFlags = section(TeacherResponseFlags, output_key="output")
    template: TemplateFlags = section(TemplateFlags, input_template=PLAIN_TEMPLATE)
    objective: objectives.DistillationFlags = section(objectives.DistillationFlags)
    checkpoints: training.CheckpointFlags = section(training.CheckpointFlags, ckpt_path="./ckpt/checkpoints_kd")


@dataclass(frozen=True, kw_only=True)
class PRMConfig(SupervisedConfig):
    r"""Train a process reward model on labelled steps.

    openrlhf train_prm --pretrain ./sft --dataset ./steps.jsonl --input_key text --label_key labels \
        --placeholder_token '<step>' --reward_tokens + - --learning_rate 1e-6 --save_path ./prm
    """

    data: DatasetFlags = section(DatasetFlags, eval_split="test")
    fields: StepFlags = section(StepFlags)
    batches: training.BatchFlags = section(training.BatchFlags, micro_train_batch_size=1)
    optimizer: training.SupervisedOptimizerFlags = section(training.SupervisedOptimizerFlags, learning_rate=1e-6)
    checkpoints: training.CheckpointFlags = section(training.CheckpointFlags, ckpt_path="./ckpt/checkpoints_prm")
    logs: training.LogFlags = section(training.LogFlags, wandb_project="openrlhf_train_prm", wandb_run_name="prm_%s")


@dataclass(frozen=True, kw_only=True)
class RLConfig(TrainingConfig):
    r"""Reinforcement learning (PPO, GRPO, RLOO, REINFORCE++, agents) on many devices, with Ray.

    openrlhf train_ppo_ray --pretrain ./sft --prompt_data ./prompts.jsonl --input_key question --label_key answer \
        --apply_chat_template --remote_rm_url ./reward.py --advantage_estimator group_norm --n_samples_per_prompt 8 \
        --rollout_batch_size 128 --train_batch_size 1024 --max_new_tokens 1024 --init_kl_coef 0 \
        --actor_num_gpus_per_node 8 --vllm_num_engines 8 --colocate_all_models --vllm_enable_sleep \
        --deepspeed_enable_sleep --save_path ./grpo
    """

    prompts: rl.PromptFlags = section(rl.PromptFlags)
    template: TemplateFlags = section(TemplateFlags)
    rollout: rl.RolloutFlags = section(rl.RolloutFlags)
    asynchrony: rl.AsyncTrainingFlags = section(rl.AsyncTrainingFlags)
    rewards: rl.RewardFlags = section(rl.RewardFlags)
    advantage: algorithm.AdvantageFlags = section(algorithm.AdvantageFlags)
    kl: algorithm.KLControlFlags = section(algorithm.KLControlFlags)
    policy: algorithm.PolicyLossFlags = section(algorithm.PolicyLossFlags)
    critic: algorithm.CriticFlags = section(algorithm.CriticFlags)
    head: ValueHeadFlags = section(ValueHeadFlags)
    placement: cluster.PlacementFlags = section(cluster.PlacementFlags)
    engines: cluster.EngineFlags = section(cluster.EngineFlags)
    batches: training.BatchFlags = section(training.BatchFlags, micro_train_batch_size=4)
    optimizer: algorithm.PolicyOptimizerFlags = section(algorithm.PolicyOptimizerFlags)
    checkpoints: training.CheckpointFlags = section(
        training.CheckpointFlags, ckpt_path="./ckpt/checkpoints_ppo_ray", max_ckpt_mem=float("inf")
    )
    logs: training.LogFlags = section(training.LogFlags, wandb_project="openrlhf_train_ppo", wandb_run_name="ppo_%s")


@dataclass(frozen=True, kw_only=True)
class LocalRLConfig(RLConfig):
    r"""Reinforcement learning (PPO, GRPO, RLOO, REINFORCE++, agents) in one process, or under a launcher.

    openrlhf train_ppo --pretrain ./sft --prompt_data ./prompts.jsonl --input_key question --label_key answer \
        --apply_chat_template --remote_rm_url ./reward.py --advantage_estimator group_norm --n_samples_per_prompt 8 \
        --rollout_batch_size 32 --train_batch_size 256 --max_new_tokens 512 --init_kl_coef 0 --save_path ./grpo
    """

    placement: cluster.PlacementFlags = section(cluster.PlacementFlags, runtime="local")


@dataclass(frozen=True, kw_only=True)
class BatchInferenceConfig:
    r"""Generate, score and post-process responses for whole datasets.

    openrlhf batch_inference --eval_task generate --pretrain ./model --dataset ./prompts.jsonl --input_key question \
        --apply_chat_template --best_of_n 4 --max_new_tokens 512 --output_path ./answers.jsonl
    """

    task: inference.BatchTaskFlags = section(inference.BatchTaskFlags)
    model: ServedModelFlags = section(ServedModelFlags)
    head: ValueHeadFlags = section(ValueHeadFlags)
    data: inference.BatchDataFlags = section(inference.BatchDataFlags, max_samples=100_000_000)
    template: TemplateFlags = section(TemplateFlags)
    sampling: inference.SamplingFlags = section(inference.SamplingFlags)


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    r"""Chat with a model.

    openrlhf interactive_chat --pretrain ./model --apply_chat_template --temperature 0.7
    """

    model: ServedModelFlags = section(ServedModelFlags)
    chat: inference.ChatFlags = section(inference.ChatFlags)
    template: TemplateFlags = section(TemplateFlags, input_template=PLAIN_TEMPLATE)
    sampling: inference.SamplingFlags = section(
        inference.SamplingFlags, temperature=0.2, top_p=0.9, repetition_penalty=1.2
    )


@dataclass(frozen=True, kw_only=True)
class ServeRMConfig:
    r"""Serve a reward model over HTTP.

    openrlhf serve_rm --reward_pretrain ./rm --port 5000 --max_len 4096
    """

    server: inference.ServingFlags = section(inference.ServingFlags)
    head: ValueHeadFlags = section(ValueHeadFlags)
    model: LoadingFlags = section(LoadingFlags)


@dataclass(frozen=True, kw_only=True)
class LoraCombinerConfig:
    r"""Merge a LoRA adapter into its base model.

    openrlhf lora_combiner --model_path ./base --lora_path ./adapter --output_path ./merged
    """

    merge: inference.MergeFlags = section(inference.MergeFlags)
    model: PrecisionFlags = section(PrecisionFlags)


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """Write a commented YAML file for a task (sft, dpo, grpo, ...), and the code file that it needs.

    openrlhf init grpo --output run.yaml
    """

    starter: setup.InitFlags = section(setup.InitFlags)


@dataclass(frozen=True, kw_only=True)
class DoctorConfig:
    """Check this machine (packages, devices, memory, disks, limits) and say how to fix what is wrong.

    openrlhf doctor
    """

    report: setup.DoctorFlags = section(setup.DoctorFlags)


@dataclass(frozen=True, kw_only=True)
class ViewConfig:
    """Show the curves and samples of runs in a browser.

    openrlhf view ./sft ./grpo
    """

    runs: view.RunFolderFlags = section(view.RunFolderFlags)
    page: view.PageFlags = section(view.PageFlags)


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Merge an adapter, convert a model to GGUF for llama.cpp and Ollama, or upload it to the hub.

    openrlhf export --pretrain ./grpo --gguf q8_0 --output_path ./out
    """

    export: ExportFlags = section(ExportFlags)
    model: PrecisionFlags = section(PrecisionFlags)
    hub: HubFlags = section(HubFlags)


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
    "export": ExportConfig,
    "view": ViewConfig,
    "init": InitConfig,
    "doctor": DoctorConfig,
}
