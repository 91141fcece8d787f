"""System calls for isolating a program: namespaces, mounts, privileges and a system-call filter.

Python 3.11 wraps few of them, so they are called through ctypes. The module needs only the standard library: the fork
server loads it in a bare interpreter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

NEW_MOUNTS, NEW_UTS, NEW_IPC = 0x00020000, 0x04000000, 0x08000000  # linux/sched.h: CLONE_NEW*
NEW_USER, NEW_PIDS, NEW_NET = 0x10000000, 0x20000000, 0x40000000
READ_ONLY, NO_SUID, NO_DEVICES = 1, 2, 4  # linux/mount.h: MS_*
REMOUNT, BIND, RECURSIVE, SLAVE = 0x20, 0x1000, 0x4000, 0x80000
DETACH = 2  # MNT_DETACH
PARENT_DEATH_SIGNAL, SET_DUMPABLE, SET_SECCOMP, DROP_BOUNDING, SET_SUBREAPER, NO_NEW_PRIVILEGES, AMBIENT = (
    *(1, 4, 22, 24, 36, 38, 47),  # linux/prctl.h: PR_*
)
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442  # the numbers are the same on all architectures
CAPABILITY_VERSION = 0x20080522  # linux/capability.h: two 32-bit words per set
DENIED = 0x00050000 | errno.EPERM  # linux/seccomp.h: SECCOMP_RET_ERRNO
NOT_IMPLEMENTED = 0x00050000 | errno.ENOSYS
ALLOWED = 0x7FFF0000
SOCKET_FAMILIES = (1, 2, 10)  # UNIX, INET, INET6; others (vsock, netlink, packet) may bypass the network namespace

# Kernel interfaces that a program does not need and that have a history of privilege escalations, and interfaces to
# memory that is not charged to a process, which only control groups could limit.
# Per architecture: audit number, socket, clone, clone3, then the denied calls: ptrace, mount, umount2, pivot_root,
# unshare, setns, bpf, perf_event_open, userfaultfd, add_key, request_key, keyctl, process_vm_readv, process_vm_writev,
# open_by_handle_at, io_uring_setup, open_tree, move_mount, fsopen, mount_setattr, memfd_create, memfd_secret, shmget,
# msgget, mq_open.
SYSTEM_CALLS: dict[str, tuple[int, int, int, int, tuple[int, ...]]] = {
    "x86_64": (
        *(0xC000003E, 41, 56, 435),
        (
            *(101, 165, 166, 155, 272, 308, 321, 298, 323, 248, 249, 250, 310, 311, 304, 425, 428, 429, 430, 442),
            *(319, 447, 29, 68, 240),
        ),
    ),
    "aarch64": (
        *(0xC00000B7, 198, 220, 435),
        (
            *(117, 40, 39, 41, 97, 268, 280, 241, 282, 217, 218, 219, 270, 271, 265, 425, 428, 429, 430, 442),
            *(279, 447, 194, 186, 180),
        ),
    ),
}

_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """Return the result of a system call; raise OSError with the name of the call if it failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Move this process (for NEW_PIDS: its next child) into new namespaces."""
    check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system, or bind a path to another one."""
    given = [os.fsencode(text) or None for text in (source, target, kind, options)]
    result = _libc.mount(given[0], given[1], given[2], ctypes.c_ulong(flags), given[3])
    check(result, f"mount {target}")


def bind(source: str, target: str, *, read_only: bool = True) -> None:
    """Bind-mount a folder or file to a second path, with everything mounted below it."""
    mount(source, target, flags=BIND | RECURSIVE)
    if read_only:
        # struct mount_attr: attr_set, attr_clr, propagation, userns_fd; 0x8000 is AT_RECURSIVE
        attributes = struct.pack("QQQQ", READ_ONLY | NO_SUID | NO_DEVICES, 0, 0, 0)
        result = _libc.syscall(MOUNT_SETATTR, -100, os.fsencode(target), 0x8000, attributes, len(attributes))
        check(result, f"mount_setattr {target}")


def copy_mount(path: str) -> int:
    """Return a descriptor of a copy of the mount at a path, which `attach_mount` makes visible."""
    flags = 0x8001 | os.O_CLOEXEC  # AT_RECURSIVE | OPEN_TREE_CLONE
    return check(_libc.syscall(OPEN_TREE, -100, os.fsencode(path), ctypes.c_uint(flags)), f"open_tree {path}")


def attach_mount(descriptor: int, path: str) -> None:
    """Mount a copy at a path, and close its descriptor."""
    try:
        result = _libc.syscall(MOVE_MOUNT, descriptor, b"", -100, os.fsencode(path), 4)  # MOVE_MOUNT_F_EMPTY_PATH
        check(result, f"move_mount {path}")
    finally:
        os.close(descriptor)


def use_root(folder: str) -> None:
    """Make a mounted folder the root; the old root is then at /old."""
    os.mkdir(f"{folder}/old", 0o700)
    check(_libc.pivot_root(os.fsencode(folder), os.fsencode(f"{folder}/old")), "pivot_root")
    os.chdir("/")


def unmount(path: str) -> None:
    check(_libc.umount2(os.fsencode(path), DETACH), f"umount {path}")


def prctl(option: int, *values: int) -> int:
    padded = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    return check(_libc.prctl(ctypes.c_int(option), *padded), f"prctl {option}")


def drop_privileges(uid: int, gid: int) -> None:
    """Switch to an unprivileged user and give up all capabilities."""
    for number in range(64):
        if _libc.prctl(DROP_BOUNDING, number, 0, 0, 0) < 0:  # past the last capability of this kernel
            break
    prctl(AMBIENT, 4)  # clear all
    if uid != os.getuid():
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    header, none = struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)
    check(_libc.capset(header, none), "capset")


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Encode one instruction of classic BPF (struct sock_filter)."""
    return struct.pack("HBBI", code, if_true, if_false, value)


def make_filter(machine: str) -> bytes:
    """Return a seccomp filter that denies SYSTEM_CALLS, sockets of other families and new user namespaces."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    audit, socket, clone, clone3, denied = SYSTEM_CALLS[machine]
    number, architecture, argument = 0, 4, 16 if sys.byteorder == "little" else 20  # in struct seccomp_data
    deny = _instruction(give, DENIED)
    lines = [_instruction(load, architecture), _instruction(equal, audit, 1, 0), deny, _instruction(load, number)]
    if machine == "x86_64":  # calls of the x32 ABI have other numbers
        lines += [_instruction(at_least, 0x40000000, 0, 1), deny]
    for call in denied:
        lines += [_instruction(equal, call, 0, 1), deny]
    lines += [_instruction(equal, clone3, 0, 1), _instruction(give, NOT_IMPLEMENTED)]  # libc then uses clone
    lines += [_instruction(equal, clone, 0, 3), _instruction(load, argument)]
    lines += [_instruction(any_bit, NEW_USER, 0, 1), deny, _instruction(load, number)]
    lines += [_instruction(equal, socket, 0, len(SOCKET_FAMILIES) + 2), _instruction(load, argument)]
    for place, family in enumerate(SOCKET_FAMILIES):
        lines += [_instruction(equal, family, len(SOCKET_FAMILIES) - place, 0)]
    return b"".join([*lines, deny, _instruction(give, ALLOWED)])


def filter_system_calls(machine_filter: bytes) -> None:
    """Install a seccomp filter in this process and all processes that it starts; needs NO_NEW_PRIVILEGES."""
    code = ctypes.create_string_buffer(machine_filter, len(machine_filter))
    program = struct.pack("HxxxxxxP", len(machine_filter) // 8, ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(program, len(program))
    prctl(SET_SECCOMP, 2, ctypes.addressof(buffer))
