"""Reinforcement learning (PPO, GRPO, RLOO, REINFORCE++, agents) on many devices, with Ray."""

from openrlhf.cli.entry import make_main

main = make_main("train_ppo_ray")

if __name__ == "__main__":
    main()
