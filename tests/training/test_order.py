"""Which rows belong to a step: a function of seed and step alone."""

import math

from hypothesis import given
from hypothesis import strategies as st

from openrlhf.training.order import Order, micro_batches, num_micro_batches, share

sizes = st.integers(1, 40)
orders = st.builds(Order, num_rows=sizes, batch_size=sizes, epochs=st.integers(1, 3), seed=st.integers(0, 99))


def test_order_matches_hand_computation():
    order = Order(num_rows=10, batch_size=4, epochs=2, seed=0)
    assert order.steps_per_epoch == 3
    assert order.total_steps == 6
    assert [len(order.rows(step)) for step in range(6)] == [4, 4, 2, 4, 4, 2]  # the incomplete batch is trained
    assert [order.ends_epoch(step) for step in range(6)] == [False, False, True, False, False, True]


def test_a_dataset_smaller_than_a_batch_is_one_step():
    order = Order(num_rows=3, batch_size=128, epochs=1, seed=0)
    assert order.total_steps == 1
    assert sorted(order.rows(0)) == [0, 1, 2]


@given(orders)
def test_every_row_appears_once_per_epoch(order):
    for epoch in range(order.epochs):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        assert sorted(row for step in steps for row in order.rows(step)) == list(range(order.num_rows))
    assert order.total_steps == order.epochs * math.ceil(order.num_rows / order.batch_size)


@given(orders, st.data())
def test_a_step_depends_on_seed_and_step_alone(order, data):
    step = data.draw(st.integers(0, order.total_steps - 1))
    for earlier in range(step):
        order.rows(earlier)
    longer = Order(order.num_rows, order.batch_size, order.epochs + 5, order.seed, max_steps=1)
    assert order.rows(step) == longer.rows(step)


def test_epochs_and_seeds_shuffle_differently():
    order = Order(num_rows=50, batch_size=50, epochs=2, seed=0)
    other = Order(num_rows=50, batch_size=50, epochs=2, seed=1)
    assert order.rows(0) != order.rows(1)
    assert order.rows(0) != other.rows(0)
    assert order.rows(0) != list(range(50))


@given(orders, st.integers(1, 200))
def test_max_steps_only_shortens_a_run(order, most):
    short = Order(order.num_rows, order.batch_size, order.epochs, order.seed, most)
    assert short.total_steps == min(order.total_steps, most)


@given(items=st.lists(st.integers()), ranks=st.integers(1, 9), size=st.integers(1, 9))
def test_ranks_share_evenly_and_run_equally_many_micro_batches(items, ranks, size):
    parts = [share(items, rank, ranks) for rank in range(ranks)]
    assert sorted(item for part in parts for item in part) == sorted(items)
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1
    cuts = [micro_batches(part, size) for part in parts]
    assert [[item for cut in rank for item in cut] for rank in cuts] == parts
    assert all(1 <= len(cut) <= size for rank in cuts for cut in rank)
    assert max(map(len, cuts)) == num_micro_batches(len(items), ranks, size)
