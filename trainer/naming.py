"""
The folder of a run that was given none: out/<name>, out/<name>-2, ... The name says which config file, and what was typed on
top of it (configurator.run_name). out/latest points to the newest run in out/.
"""

import contextlib
import os
import re

import configurator
from configurator import ConfigError
from system import files
from trainer import checkpoint, log, resume

FOLDER, LATEST = "out", "latest"


class Taken(Exception):
    """Somebody else writes there."""


def numbered(name, number):
    return os.path.join(FOLDER, name if number == 1 else f"{name}-{number}")


@contextlib.contextmanager
def held(config, name):
    """Hold the folder of a run and yield its path: the one that is given; or the newest run of this name, where the run is to
    go on; or a new one."""
    folder = config.out_dir if name is None else to_go_on_with(config, name)
    with contextlib.ExitStack() as stack:
        if folder:
            stack.enter_context(files.only_writer(folder, ConfigError))
        number = 0
        while not folder:
            number += 1
            with contextlib.suppress(Taken), contextlib.ExitStack() as trial:
                trial.enter_context(files.only_writer(numbered(name, number), Taken))
                if not resume.holds_a_run(numbered(name, number)):
                    stack.push(trial.pop_all())
                    folder = numbered(name, number)
        yield folder


def to_go_on_with(config, name):
    """The newest run of this name, of these settings if there is one; None to start anew."""
    if config.resume == "False":
        return None
    runs = runs_called(name)
    same = [run for run in runs if same_settings(run, config)]
    if config.resume == "auto" or same:
        return same[0] if same else None
    if runs:
        return runs[0]  # the checkpoint's own check says what differs
    raise ConfigError(f"resume: there is no run {numbered(name, 1)} to go on with" + hint())


def hint():
    """What there is instead."""
    there = [os.path.join(FOLDER, run) for run in (os.listdir(FOLDER) if os.path.isdir(FOLDER) else ()) if run != LATEST]
    runs = [run for run in sorted(there, key=age) if checkpoint.saved_in(run)]
    return f"; the newest is python train.py {runs[0]}" if runs else "; without --resume=True a new one starts"


def runs_called(name):
    """The folders of runs of this name, the newest first."""
    pattern = re.compile(re.escape(name) + r"(-[2-9]|-[1-9]\d+)?")
    there = os.listdir(FOLDER) if os.path.isdir(FOLDER) else []
    runs = [os.path.join(FOLDER, folder) for folder in there if pattern.fullmatch(folder)]
    return sorted((run for run in runs if checkpoint.saved_in(run)), key=age)


def age(run):
    """Larger for those that were written to longer ago."""
    paths = [os.path.join(run, log.NAME), *checkpoint.saved_in(run)]
    return -max((os.path.getmtime(path) for path in paths if os.path.exists(path)), default=0)


def same_settings(run, config):
    try:
        return not checkpoint.differing(vars(configurator.read_run(run)), config)
    except ConfigError:
        return False


def point_to(folder):
    """Make out/latest point to a run in out/. Where there are no links, or something else has that name, it stays away."""
    parent, name = os.path.split(os.path.normpath(folder))
    link = os.path.join(FOLDER, LATEST)
    if parent != FOLDER or name == LATEST or (os.path.lexists(link) and not os.path.islink(link)):
        return
    temporary = f"{link}.{os.getpid()}.tmp"
    with contextlib.suppress(OSError, NotImplementedError):
        os.symlink(name, temporary)
        os.replace(temporary, link)
    with contextlib.suppress(OSError):
        os.unlink(temporary)
