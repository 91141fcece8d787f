"""Reinforcement learning and generation on a cluster: who sits where, processes and their deaths, engines, syncs."""
