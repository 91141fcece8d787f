"""The command `doctor`: is this machine ready, and if not, what to do about it.

Each module returns findings about one area: `packages`, `devices`, `host` (memory, disks, limits, ports) and `services`
(the sandbox for programs, the hub). `report` prints them. None of this needs torch; if torch is missing, that is a
finding.
"""
