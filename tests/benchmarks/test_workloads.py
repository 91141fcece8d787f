import statistics

import pytest
from workloads import WORKLOADS, find_workload, response_lengths, w1, w2, w3, w4


def test_w2_has_lengths_from_32_to_2048_with_a_mean_of_400():
    lengths = w2().lengths
    assert len(lengths) == 512
    assert (min(lengths), max(lengths), statistics.mean(lengths)) == (32, 2048, 400)


@pytest.mark.parametrize(
    ("count", "shortest", "longest", "mean"), [(8, 4, 32, 12), (100, 1, 10, 9), (64, 5, 5000, 300), (3, 1, 9, 5)]
)
def test_lengths_keep_their_limits_and_their_mean(count, shortest, longest, mean):
    lengths = response_lengths(count, shortest=shortest, longest=longest, mean=mean)
    assert (len(lengths), min(lengths), max(lengths)) == (count, shortest, longest)
    assert sum(lengths) == count * mean


def test_most_responses_of_w2_are_short_and_each_prompt_has_long_and_short_ones():
    workload = w2()
    assert statistics.median(workload.lengths) < 200
    size = workload.samples
    groups = [workload.lengths[place : place + size] for place in range(0, len(workload.lengths), size)]
    assert all(min(group) < 100 and max(group) > 800 for group in groups)


def test_w1_and_w4_train_on_the_same_number_of_tokens():
    assert w1().tokens == w4().tokens == 512 * 640
    assert w2().tokens == 512 * (128 + 400)


def test_only_w3_has_a_critic():
    assert [find_workload(name).has_critic for name in WORKLOADS] == [False, False, True, False]
    assert w3().lengths == w1().lengths


def test_micro_batches_of_padded_samples_fit_and_divide_the_rollout():
    assert [find_workload(name).micro_batch_samples for name in WORKLOADS] == [16, 4, 16, 4]
    for name in WORKLOADS:
        for tiny in (False, True):
            workload = find_workload(name, tiny=tiny)
            assert workload.num_samples % workload.micro_batch_samples == 0
            assert workload.micro_batch_samples * workload.context <= workload.micro_batch_tokens


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("tiny", [False, True])
def test_a_workload_has_a_length_for_each_sample_and_fits_its_model(name, tiny):
    workload = find_workload(name, tiny=tiny)
    assert len(workload.lengths) == workload.num_samples
    assert workload.context <= workload.shape.max_position_embeddings
