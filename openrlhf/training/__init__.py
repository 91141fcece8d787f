"""Training: what a step minimises, how it runs on one device or many, and the supervised loop.

    supervised     the supervised commands from config to saved model
      preflight, processes, rng    checks, devices and seeds before the models load
      build                        network, backend and objective of a command
      fit, order                   the loop, and which rows belong to a step
    objectives, rl_objectives      losses of `algo` applied to the outputs of a network
    backend                        TrainBackend and Objective, the interface between loop, objective and hardware
      local, optim                 one process: fp32 masters, Adam and Muon, loss scale
      deepspeed*, ring_groups      several processes: ZeRO, tensor parallelism, rings
      audit, host_memory           for both: do all parameters learn; sleep in host memory
    run_directory, earlier_run     files of a run, shared with RL
      folder_lock                  one run per folder
      checkpoint, manifest         folders that are complete or absent, and verified
      final_save, disk_space       full and forbidden disks

The RL loop (`rl`) uses everything from `objectives` downwards.
"""
