"""Random states in checkpoints, and dropout that differs between ranks."""

import torch

from openrlhf.training.rng import load_rng, save_rng, seed_dropout


def test_random_states_are_restored(tmp_path):
    torch.manual_seed(0)
    torch.rand(3)
    save_rng(tmp_path, rank=0)
    expected = torch.rand(5)
    torch.manual_seed(1)
    load_rng(tmp_path, rank=0)
    assert torch.equal(torch.rand(5), expected)


def test_each_rank_has_its_own_random_state(tmp_path):
    draw = []
    for rank in (0, 1):
        torch.manual_seed(rank)
        save_rng(tmp_path, rank)
        draw.append(torch.rand(2))
    for rank in (1, 0):
        load_rng(tmp_path, rank)
        assert torch.equal(torch.rand(2), draw[rank])


def test_a_new_rank_keeps_its_own_random_state(tmp_path):
    torch.manual_seed(0)
    load_rng(tmp_path, rank=7)
    here = torch.rand(2)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(2), here)


def test_ranks_draw_different_reproducible_dropout():
    def draw(seed, rank):
        seed_dropout(seed, rank)
        return tuple(torch.rand(3).tolist())

    cases = [(42, 0), (42, 1), (43, 0), (43, 1)]
    assert len({draw(*case) for case in cases}) == len(cases)
    assert draw(42, 1) == draw(42, 1)
