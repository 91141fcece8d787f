"""Ray runtime: reinforcement learning and generation on a cluster.

`placement` plans which devices each process gets, `address`, `driver` and `cluster` join or start Ray and reserve the
devices, and `start` creates the processes (`worker`). The controller drives them through `workers`, `engines` and
`sync`; `calls` and `head` detect processes and clusters that die.
"""
