"""
Files that are whole or not there, and folders that one process writes to.

    files.write_atomically(path, lambda f: f.write(data))      # all of it, or what was there before
    with files.only_writer(folder, ConfigError): ...           # the kernel takes the lock back when its holder dies, however
                                                               # it dies: none is ever stale
"""

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import stat
import sys
import zlib

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

LOCK = "lock"
OF_A_RUN = r"ckpt(\.\w+)?\.pt|log(\.\d+)?\.jsonl|config\.json|step_time\.json"  # nobody else writes them
PICTURES = r"(report|compare|layers|whatif)\.png|compare\.json"
# a pipe would wait for somebody to write into it
FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
NOT_REGULAR = "{} is a link, a pipe, a folder or a device, which a lock must not be: remove it"


# -- whole files

def beside(path):
    """A name for a file while it is written; a whole one is moved to its own name. A killed process leaves it behind."""
    return f"{path}.{secrets.token_hex(4)}.tmp"


def remove_leftovers(folder, pattern):
    """Remove what killed processes left beside files that `pattern` describes; any other *.tmp is somebody's own. For
    who holds the folder's lock."""
    for name in os.listdir(folder):
        if re.fullmatch(rf"(?:{pattern})\.[0-9a-f]{{8}}\.tmp", name):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, name))


class Output:
    """A file on its way to `path`: written beside it, put in its place by publish(), removed by discard(). It keeps a
    checksum of what is written, and the reason of a failure, which torch.save does not tell."""

    def __init__(self, path):
        self.path, self.partial, self.crc, self.error = os.fspath(path), beside(path), 0, None
        with about(self.path):
            self.file = open(self.partial, "wb")  # noqa: SIM115 - closed by finish or discard

    def write(self, data):
        try:
            self.file.write(data)
        except OSError as e:
            self.error = e
            raise
        self.crc = zlib.crc32(data, self.crc)
        return len(data)

    def flush(self):
        self.file.flush()

    def finish(self):
        """From here on it is on the disk."""
        with self.file:
            self.file.flush()
            os.fsync(self.file.fileno())

    def publish(self):
        os.replace(self.partial, self.path)

    def discard(self):
        with contextlib.suppress(OSError):  # a full disk: what it still holds is not wanted
            self.file.close()
        with contextlib.suppress(OSError):
            os.unlink(self.partial)


def write_atomically(path, write, ready=lambda: None):
    """Call write(file) on a temporary neighbour and, once that is on the disk, ready(); then put it in place of `path`. A
    failure names `path` and leaves nothing behind."""
    output = Output(path)
    try:
        with about(path, output):
            write(output)
            output.finish()
        ready()
        with about(path):
            output.publish()
            sync_folder(os.path.dirname(path) or ".")  # the new name survives a power cut, too
    finally:
        output.discard()


@contextlib.contextmanager
def about(path, output=None):
    """What the system refuses inside is refused for `path`, the name that the user knows."""
    try:
        yield
    except Exception as e:
        cause = output and output.error or e
        if isinstance(cause, OSError) and cause.strerror:
            raise OSError(cause.errno, cause.strerror, path) from None
        raise


def sync_folder(path):
    if os.name != "posix":
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_text(path, most=1_000_000):
    """The text of a small file that somebody else may have put there: OSError for what would keep us waiting, as a pipe."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError("no file")
    with open(path, encoding="utf-8") as f:
        text = f.read(most + 1)
    if len(text) > most:
        raise OSError("too long")
    return text


def write_json(path, value, ready=lambda: None):
    write_atomically(path, lambda f: f.write((json.dumps(value, indent=2) + "\n").encode()), ready)


# -- one writer

@contextlib.contextmanager
def only_writer(folder, error, wait=False):
    """Hold `folder`, made if need be; yield the descriptor of the lock. Where somebody else has it, raise error(who) or wait.

    A process that inherits the descriptor holds the lock, too. A folder made here that stays empty is removed again."""
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
                if is_named(descriptor, os.path.join(folder, LOCK)):  # else somebody removed it, and it is another's now
                    os.unlink(os.path.join(folder, LOCK))
            os.close(descriptor)
        for path in made:
            with contextlib.suppress(OSError):  # it is not empty
                os.rmdir(path)


def acquire(folder, error, wait):
    path = os.path.join(folder, LOCK)
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
        except FileNotFoundError:
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
        os.close(descriptor)  # its last holder removed the file: lock the new one


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
    """The folders that are to be made for `folder` to be there, the innermost first."""
    missing, path = [], os.path.abspath(folder)
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing
