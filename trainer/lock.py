"""One writer per folder. The kernel takes the lock back when its holder dies, however it dies, so none is ever stale."""

import contextlib
import errno
import os
import socket
import stat
import sys

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

NAME = "lock"
# a pipe would wait for somebody to write into it
FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
NOT_REGULAR = "{} is a link, a pipe, a folder or a device, which a lock must not be: remove it"


@contextlib.contextmanager
def only_writer(folder, error, wait=False):
    """Hold `folder`, made if need be, and yield the descriptor of the lock. Where somebody else has it: error(who), or wait.

    A process that inherits the descriptor holds the lock, too. What is left empty is removed again."""
    made = missing_folders(folder)
    descriptor = None
    try:
        descriptor = acquire(folder, error, wait)
        with contextlib.suppress(OSError):  # a full disk: the lock holds without a name in it
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield descriptor
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                if is_named(descriptor, os.path.join(folder, NAME)):  # else somebody removed it, and it is another's now
                    os.unlink(os.path.join(folder, NAME))
            os.close(descriptor)
        for path in made:
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(path)


def acquire(folder, error, wait):
    path = os.path.join(folder, NAME)
    while True:
        make(folder)
        try:
            descriptor = os.open(path, FLAGS, 0o644)
        except FileNotFoundError:  # its last holder left the folder empty and removed it
            continue
        except OSError as e:
            if not os.path.lexists(path) or stat.S_ISREG(os.lstat(path).st_mode):
                raise
            raise error(NOT_REGULAR.format(path)) from e
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise error(NOT_REGULAR.format(path))
        try:
            if fcntl:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_named(descriptor, path):
                return descriptor
        except FileNotFoundError:  # its last holder removed it in between
            pass
        except OSError as e:
            if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return descriptor  # a file system without locks
            holder = os.read(descriptor, 200).decode("utf-8", "replace") or "another process"
            if not wait:
                os.close(descriptor)
                raise error(f"{folder} is in use by {holder}: wait for it, or stop it, or take another folder") from None
            print(f"{folder} is in use by {holder}: waiting", file=sys.stderr, flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.close(descriptor)


def make(folder):
    """The folder and those around it. A link that leads nowhere, or in a circle, exists, and is no folder."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as e:
        path = os.path.abspath(folder)
        while not os.path.lexists(path):
            path = os.path.dirname(path)
        if not os.path.islink(path) or os.path.exists(path):
            raise
        raise OSError(e.errno, f"A link to {os.readlink(path)}, which is not there; take another folder, or remove the link",
                      path) from None


def is_named(descriptor, path):
    """Whether an open file still has that name."""
    return os.path.samestat(os.fstat(descriptor), os.stat(path))


def missing_folders(folder):
    """Those that making `folder` will make, the innermost first."""
    missing, path = [], os.path.abspath(folder)
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing
