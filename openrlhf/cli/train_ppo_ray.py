"""Reinforcement learning with PPO, REINFORCE++, RLOO, GRPO or Dr. GRPO; single- and multi-turn agents."""

from openrlhf.cli.entry import make_main

main = make_main("train_ppo_ray")

if __name__ == "__main__":
    main()
