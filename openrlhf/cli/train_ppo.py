"""Reinforcement learning (PPO, GRPO, RLOO, REINFORCE++, agents) in one process, or under a launcher."""

from openrlhf.cli.entry import make_main

main = make_main("train_ppo")

if __name__ == "__main__":
    main()
