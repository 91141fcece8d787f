"""Training: the objectives, the backends that run them on one or several devices, and the supervised loop.

    supervised                     a supervised command, from config to saved model
      preflight, processes, rng    checks, devices and seeds before the models load
      build                        network, backend and objective of a command
      fit, order                   the training loop, and the assignment of rows to steps
    objectives, rl_objectives      apply the losses of `algo` to the outputs of a network
    backend                        TrainBackend and Objective, the interface between loop, objective and hardware
      local, optim                 one process: fp32 master weights, Adam and Muon, loss scale
      distributed, process_grid    several processes: collective operations, groups
      deepspeed*                   ZeRO, tensor parallelism
      fsdp*                        PyTorch's FSDP2
      tensor_parallel              under FSDP: matrices split by the plan of a model
      expert_parallel              under FSDP: experts split across processes
      compilation                  torch.compile for the layers of a decoder
      moving_average               an average of the weights, on their shards
      audit, host_memory           for all: check that all parameters learn; offload tensors during sleep
    run_directory, earlier_run     files of a run, shared with RL
      folder_lock                  locks that allow one run per folder
      atomic_folder, checkpoint    folders that appear complete; the checkpoints among them
      manifest                     verification of checkpoints
      final_save, disk_space       saving when a disk is full or read-only

The RL loop (`rl`) uses everything from `objectives` downwards.
"""
