"""The rules of each command, in the order in which they run.

`check` is called once, right after parsing. Rules about a single flag (its range, whether it is required) are part of
its declaration. Rules about several flags are functions in `checks/`, each named after its rule. The order matters: a
rule gets the config as changed by earlier rules and can rely on their checks. Files are checked last, because a wrong
flag is easier to fix than a missing file.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from openrlhf.config import commands
from openrlhf.config.checks import (
    asynchrony,
    common,
    export,
    extras,
    inference,
    paths,
    placement,
    revisions,
    rl,
    sharding,
    supervised,
)
from openrlhf.config.checks.rule import Changed, Rule
from openrlhf.config.flags import flags_of
from openrlhf.config.no_effect.lines import answers
from openrlhf.config.no_effect.table import TABLE
from openrlhf.monitor import say

C = TypeVar("C")
Rules = Sequence[Rule[Any]]

REVISIONS: Rules = (
    revisions.revisions_are_not_empty,
    revisions.revision_becomes_part_of_the_name,
    revisions.models_with_a_revision_are_on_a_hub,
)
FILES: Rules = (
    *REVISIONS,
    revisions.each_hub_dataset_has_a_revision,
    revisions.the_same_dataset_has_the_same_revision,
    paths.model_folders_exist,
    paths.dataset_files_exist,
    paths.named_files_exist,
)
TEMPLATE: Rules = (
    common.texts_are_unicode,
    common.empty_template_is_none,
    common.template_has_a_placeholder,
    common.template_has_line_breaks,
    common.chat_template_kwargs_are_json,
)
MODEL: Rules = (
    common.required_flags_are_given,
    common.numbers_are_in_range,
    common.four_bit_needs_bf16,
    paths.paths_are_valid,
)
TRAINING: Rules = (
    *MODEL,
    common.four_bit_trains_adapters,
    common.tensor_parallel_needs_bf16,
    common.ring_attention_is_our_own,
    common.probabilities_match_datasets,
    common.evaluation_data_has_one_source,
    common.resuming_needs_checkpoints,
    extras.needed_extras_are_installed,
    export.repository_name_is_valid,
    export.uploading_needs_a_login,
    paths.outputs_can_be_written,
)
SHARDING: Rules = (
    sharding.local_backend_is_one_process,
    sharding.muon_trains_whole_matrices,
    sharding.overlapping_needs_sharded_gradients,
    sharding.offloading_needs_a_sharded_optimizer,
    sharding.hierarchy_needs_sharded_weights,
    sharding.gradient_sums_use_fp32_or_the_weights_dtype,
    sharding.fp16_needs_a_loss_scale,
    sharding.tensor_parallelism_splits_plain_layers,
    sharding.fsdp_divides_experts,
    sharding.four_bit_weights_are_not_sharded,
    sharding.compiled_layers_are_not_sharded,
)
SUPERVISED: Rules = (
    *TRAINING,
    supervised.ring_attention_needs_packing,
    common.packing_needs_our_attention,
    supervised.processes_fill_the_groups,
    *SHARDING,
    supervised.micro_batches_divide_the_batch,
)
RL: Rules = (
    placement.launched_processes_become_devices,
    *TRAINING,
    *TEMPLATE,
    rl.a_reward_is_given,
    rl.reward_addresses_are_http_or_python,
    common.keys_fit_into_a_header,
    rl.agents_are_python_files,
    rl.reward_weights_match_models,
    rl.groups_have_several_samples,
    rl.group_estimators_do_not_discount,
    rl.only_gae_has_a_critic,
    rl.rings_and_dynamic_batches_pack,
    common.packing_needs_our_attention,
    rl.kl_estimator_suits_its_place,
    asynchrony.oversampling_needs_async,
    asynchrony.samples_may_wait_for_the_queue,
    rl.ranges_are_intervals,
    asynchrony.thresholds_are_an_interval,
    rl.clip_range_is_positive,
    rl.gspo_clips_narrowly,
    asynchrony.correction_needs_the_whole_distribution,
    asynchrony.old_samples_are_corrected,
    asynchrony.log_probs_can_be_compared,
    rl.generate_max_len_within_max_len,
    rl.context_leaves_room,
    rl.shortest_response_fits,
    rl.stop_strings_are_not_empty,
    rl.overlong_buffer_fits_the_response,
    rl.evaluation_needs_eval_steps,
    placement.local_runtime_is_one_device,
    placement.engines_on_one_gpu_are_whole,
    placement.sleep_needs_colocation,
    sharding.sleeping_needs_movable_gradients,
    sharding.sharded_policies_have_other_engines,
    placement.async_engines_have_their_own_devices,
    asynchrony.partial_rollout_needs_async,
    asynchrony.empty_queue_is_synchronous,
    placement.shared_devices_have_equal_counts,
    placement.hybrid_engines_cover_the_policy,
    placement.engines_have_a_device,
    placement.groups_divide_the_devices,
    *SHARDING,
    rl.scoring_batches_cover_the_devices,
    rl.rollouts_divide_into_steps,
    *FILES,
    paths.replay_is_of_another_run,
)

RULES: dict[type, Rules] = {
    commands.SFTConfig: (
        *SUPERVISED,
        *TEMPLATE,
        supervised.multiturn_needs_a_chat_template,
        supervised.pretraining_has_no_turns,
        *FILES,
    ),
    commands.RMConfig: (*SUPERVISED, *TEMPLATE, supervised.margins_need_the_sigmoid_loss, *FILES),
    commands.DPOConfig: (*SUPERVISED, *TEMPLATE, *FILES),
    commands.KTOConfig: (*SUPERVISED, *TEMPLATE, *FILES),
    commands.KDConfig: (*SUPERVISED, *TEMPLATE, *FILES),
    commands.PRMConfig: (*SUPERVISED, supervised.reward_tokens_differ, *FILES),
    commands.RLConfig: RL,
    commands.LocalRLConfig: RL,
    commands.BatchInferenceConfig: (
        *MODEL,
        extras.needed_extras_are_installed,
        inference.post_processors_need_rewards,
        inference.reward_template_has_its_placeholders,
        inference.rows_go_to_a_file,
        inference.engines_on_ray_are_vllm,
        common.probabilities_match_datasets,
        *TEMPLATE,
        *FILES,
    ),
    commands.ChatConfig: (
        *MODEL,
        extras.needed_extras_are_installed,
        *TEMPLATE,
        inference.a_chat_begins_once,
        *FILES,
    ),
    commands.ServeRMConfig: (
        *MODEL,
        common.keys_fit_into_a_header,
        inference.other_machines_need_a_key,
        extras.needed_extras_are_installed,
        *FILES,
    ),
    commands.LoraCombinerConfig: (
        common.required_flags_are_given,
        paths.paths_are_valid,
        *FILES,
        paths.adapter_folder_exists,
        inference.merging_keeps_its_sources,
    ),
    commands.InitConfig: (common.required_flags_are_given,),
    commands.DoctorConfig: (),
    commands.ViewConfig: (
        common.required_flags_are_given,
        common.numbers_are_in_range,
        extras.serving_the_page_needs_its_extra,
        paths.run_folders_exist,
    ),
    commands.ExportConfig: (
        common.required_flags_are_given,
        export.something_is_exported,
        export.input_template_has_a_placeholder,
        extras.needed_extras_are_installed,
        export.repository_name_is_valid,
        export.uploading_needs_a_login,
        paths.paths_are_valid,
        *REVISIONS,
        export.source_is_a_model_or_an_adapter,
        export.exporting_keeps_its_source,
    ),
}


# Rules about data and templates, for commands that only read the data.
DATA_RULES = frozenset(
    {
        *TEMPLATE,
        *FILES,
        common.numbers_are_in_range,
        common.probabilities_match_datasets,
        common.evaluation_data_has_one_source,
        paths.paths_are_valid,
        supervised.multiturn_needs_a_chat_template,
        supervised.pretraining_has_no_turns,
        supervised.reward_tokens_differ,
        rl.generate_max_len_within_max_len,
        rl.context_leaves_room,
    }
)


def check_data(config: C) -> C:
    """Apply only the rules that concern the data: a preview needs no GPU, reward, extra or output folder."""
    common.require(config, flags_of(type(config)).keys() - {"output_path", "teacher_model"})
    return apply_rules(config, [rule for rule in RULES[type(config)] if rule in DATA_RULES], say)


# A plan may be for another machine, so it skips the rules about data, files, installed packages and the processes of
# this launch.
NOT_FOR_PLANS = frozenset(
    {
        *TEMPLATE,
        *(rule for rule in FILES if rule not in (*REVISIONS, paths.model_folders_exist)),
        common.required_flags_are_given,
        common.probabilities_match_datasets,
        common.evaluation_data_has_one_source,
        common.keys_fit_into_a_header,
        extras.needed_extras_are_installed,
        export.repository_name_is_valid,
        export.uploading_needs_a_login,
        paths.outputs_can_be_written,
        paths.replay_is_of_another_run,
        placement.launched_processes_become_devices,
        supervised.processes_fill_the_groups,
        supervised.micro_batches_divide_the_batch,
        supervised.multiturn_needs_a_chat_template,
        supervised.reward_tokens_differ,
        rl.a_reward_is_given,
        rl.reward_addresses_are_http_or_python,
        rl.agents_are_python_files,
    }
)


def check_sizes(config: C, tell: Callable[[str], None] = say) -> C:
    """Apply only the rules that concern the sizes of a run: a plan needs the model's config.json, but no data."""
    common.require(config, flags_of(type(config)).keys() & {"pretrain", "teacher_model"})
    return apply_rules(config, [rule for rule in RULES[type(config)] if rule not in NOT_FOR_PLANS], tell)


def check(config: C, tell: Callable[[str], None] = say, given: Collection[str] | None = None) -> C:
    """Apply a command's rules in order and return the final config.

    Flags in `given` that have no effect in this run are reported; None means all flags that differ from their defaults.
    """
    config = apply_rules(config, RULES[type(config)], tell)
    for line in answers(config, TABLE, given):
        tell(line)
    return config


def apply_rules(config: C, rules: Rules, tell: Callable[[str], None]) -> C:
    """Apply rules in order; each gets the config as changed by those before it."""
    for rule in rules:
        match rule(config):
            case str(line):
                tell(line)
            case Changed(config, line):
                tell(line)
    return config
