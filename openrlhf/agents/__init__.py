"""From a prompt to scored samples: generation, user code for rewards and agents, and validation of its results.

The RL loop calls `GroupExecutor.run_group` (`executor.py`) for each prompt; `build.py` chooses the executor.

Without an agent file, `SingleTurnSamples` generates the responses, and `FileRewards` or `ServerRewards` returns their
scores. With a reward file, these functions pass the texts to the user's code and the scores back:

    SingleTurnSamples.run_group                        single_turn.py
    FileRewards.score, call                            rewards.py
    Pool.call, Pool._run, Pool._assign                 sandbox/pool.py
    WorkerProcess.send                                 sandbox/process.py
      | pipe
    Worker.serve, _answer -> reward_func -> plain      sandbox/worker.py, in the worker process
      | pipe
    WorkerHandle.listen                                sandbox/handle.py
    read_scores                                        scores.py

With --reward_batch_groups, `GroupBatches.score` (`reward_batches.py`) joins several groups in a call. On a cluster,
`NodePools.call` (`node_pools.py`) passes each call to the pool of one of the nodes.

With an agent file, `AgentEpisodes.run_group` (`episodes.py`) sends each sample through the same pools. `Worker._answer`
calls `execute` of the file's executor, which sends its requests for the engine to the trainer through `EngineProxy`
(`engine_proxy.py`). `read_trajectory` (`trajectory.py`) validates the result.

Agent files import the public classes from `openrlhf.utils.agent`; `docs/agents.md` is the guide for users.
"""
