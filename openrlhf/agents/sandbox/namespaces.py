"""Namespaces of a fork server: map its users, enter the namespaces in a child process, and build its root folder.

The module needs only the standard library: the fork server loads it in a bare interpreter.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress

from openrlhf.agents.sandbox import linux

UNPRIVILEGED = 65534  # programs run as this user if the server is root, because RLIMIT_NPROC does not limit root
ROOT_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SETTINGS = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")
DEVICES = ("null", "zero", "full", "random", "urandom")


def map_users(server: int) -> int:
    """Map users into the server's new user namespace, from outside; return 0, or 1 if only its own user is allowed."""
    own_only = False
    for kind, own in (("gid", os.getgid()), ("uid", os.getuid())):
        try:
            if own != 0:
                raise PermissionError
            with open(f"/proc/{server}/{kind}_map", "w") as file:
                file.write(f"0 0 1\n{UNPRIVILEGED} {UNPRIVILEGED} 1\n")
        except PermissionError:
            own_only = True
            if kind == "gid":
                with open(f"/proc/{server}/setgroups", "w") as file:
                    file.write("deny")
            with open(f"/proc/{server}/{kind}_map", "w") as file:
                file.write(f"{own} {own} 1\n")
    return int(own_only)


def enter_namespaces(connection: socket.socket) -> tuple[int, int]:
    """Continue in a child process with its own namespaces; return the user and group for programs."""
    server, own = os.getpid(), (os.getuid(), os.getgid())
    wait, ready = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.close(ready)
        if not os.read(wait, 1):
            os._exit(2)  # unshare failed
        try:
            os._exit(map_users(server))
        except OSError:
            os._exit(2)
    os.close(wait)
    try:
        linux.unshare(
            linux.NEW_USER | linux.NEW_PIDS | linux.NEW_MOUNTS | linux.NEW_NET | linux.NEW_UTS | linux.NEW_IPC
        )
        os.write(ready, b"1")
    finally:
        os.close(ready)
        outcome = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if outcome not in (0, 1):
        raise OSError("users cannot be mapped into a new user namespace")
    child = os.fork()
    if child != 0:
        connection.close()
        os.waitpid(child, 0)
        os._exit(0)
    linux.prctl(linux.PARENT_DEATH_SIGNAL, signal.SIGKILL)
    return (UNPRIVILEGED, UNPRIVILEGED) if outcome == 0 else own


def make_root() -> list[str]:
    """Build a root folder of read-only bind mounts: only system libraries, this interpreter and a few devices.

    Return the mounts below /tmp, such as a Python environment there, which a program's own /tmp would hide.
    """
    prefixes = {sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))}
    real_paths = {path: os.path.realpath(path) for path in sorted(prefixes, key=len)}  # an environment may be a link
    linux.mount("none", "/", flags=linux.SLAVE | linux.RECURSIVE)
    linux.mount("tmpfs", "/tmp", "tmpfs", linux.NO_SUID | linux.NO_DEVICES, "mode=755,size=1m")
    linux.use_root("/tmp")
    for path in (*ROOT_FOLDERS, *SETTINGS):
        copy_path(path, path)
    for path, real in real_paths.items():
        copy_path(real, path)
    os.makedirs("/dev", exist_ok=True)
    for device in DEVICES:
        os.close(os.open(f"/dev/{device}", os.O_CREAT | os.O_WRONLY, 0o644))
        linux.bind(f"/old/dev/{device}", f"/dev/{device}", read_only=False)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"/dev/{name}")
    os.symlink("/tmp", "/dev/shm")  # shared memory counts towards the size of the program's folder
    for name in ("/proc", "/tmp"):
        os.makedirs(name, 0o755, exist_ok=True)
    # The kernel lets a user namespace mount a new /proc only if no part of the existing one is hidden. Containers hide
    # parts of it, so programs in a container have no /proc.
    with suppress(OSError):
        linux.mount("proc", "/proc", "proc", linux.NO_SUID | linux.NO_DEVICES)
    with open("/etc/passwd", "w") as file:
        file.write(f"program:x:{UNPRIVILEGED}:{UNPRIVILEGED}::/tmp:/bin/sh\n")
    linux.unmount("/old")
    os.rmdir("/old")
    linux.mount("none", "/", flags=linux.REMOUNT | linux.BIND | linux.READ_ONLY | linux.NO_SUID | linux.NO_DEVICES)
    socket.sethostname("program")
    return [path for path in real_paths if path.startswith("/tmp/") and os.path.ismount(path)]


def copy_path(source: str, path: str) -> None:
    """Bind-mount a path of the old root into the new one, or copy it if it is a link; do nothing if it exists there."""
    old = "/old" + source
    if not os.path.lexists(old) or os.path.lexists(path):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(old):
        os.symlink(os.readlink(old), path)
        return
    if os.path.isdir(old):
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    linux.bind(old, path)
