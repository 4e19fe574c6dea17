"""
A run in wandb, beside log.jsonl, which stays the truth: its rows under names that wandb sorts into sections (log_keys.py), its
settings and where it ran, a summary, and at the end its picture and closing words.

    python train.py --wandb_log=True
    python -m trainer.wandb_log out/run       # a run that was made without it, or was killed: sends what wandb does not have

It never asks and never waits long: offline where wandb has no key or its server does not answer. Every step is sent once, and
whole: rows are collected until the next step begins. After a kill, online, the server says where it stands: earlier rows are
left out, missing ones are sent from log.jsonl. Offline everything goes from log.jsonl to a new folder, which replaces the older
ones of the run: wandb writes its offline file in large pieces, so that a killed one may hold nothing, and wandb sync stumbles
over it. Without resume="allow", wandb sync writes such a folder over what the server may have, from the first line on.
"""

import contextlib
import glob
import html
import os
import shlex
import shutil
import sys
import threading

import configurator
import schedule
from rightbatch.common import named
from system import files
from system.errors import ConfigError, one_line
from trainer import checkpoint, log, log_keys, predict, reader

PROJECT = "rightbatch"
INIT_TIMEOUT = 10  # seconds to wait for the server before the run goes offline
FINISH_TIMEOUT = 120  # seconds to wait for the last upload
PATIENCE = 3  # seconds of it without a word


class WandbLog:
    lost = None  # why wandb lacks a part of the run

    def __init__(self, config, run_id=None, rows=()):
        """rows: of log.jsonl so far."""
        self.config = config
        self.run, self.offline = start(config, run_id)
        self.id, self.sent = self.run.id, self.run.starting_step - 1  # the newest step that the server has
        self.step, self.values = None, {}
        for row in rows:
            self.write(row)
        replace_offline(self.run)

    def write(self, row):
        if row["step"] != self.step:
            self.send()
            self.step = row["step"]
        new = values_of(row, self.config.block_size)
        events = [v["train/event"] for v in (self.values, new) if "train/event" in v]
        self.values |= new | ({"train/event": "; ".join(events)} if events else {})

    def send(self):
        """The collected rows, if wandb does not have their step."""
        if self.values and self.step > self.sent:
            self.attempt(lambda: self.run.log(self.values, step=self.step, commit=True))
            self.sent = self.step
        self.values = {}

    def attempt(self, act):
        """wandb's own process may have ended, or its server: that ends no run."""
        if self.lost:
            return
        try:
            act()
        except Exception as e:
            self.lost = first_line(e)
            log.say(f"wandb: {self.lost}: it lacks a part of the run, which log.jsonl has")

    def close(self, words=""):
        """Returns whether all was sent, or written to be sent. words: what the run said at its end; none where it goes on."""
        if words:
            self.attempt(lambda: self.values.update(media(self.config, words)))
        self.send()
        self.attempt(lambda: self.run.summary.update(summary(self.config.out_dir)))
        waiting = threading.Timer(PATIENCE, log.say, [f"wandb: waiting for the last upload, at most {FINISH_TIMEOUT} s"])
        waiting.start()
        self.attempt(self.run.finish)
        waiting.cancel()
        if self.lost:
            with contextlib.suppress(Exception):  # or it would try again when Python ends, and say so in a traceback
                sys.modules["wandb"].teardown()
            log.say("wandb: the upload is incomplete; to send the rest: python -m trainer.wandb_log "
                    f"{shlex.quote(self.config.out_dir)}")
        elif self.offline:
            log.say(f"wandb: offline; to send the run: {sync_command(self.run)}")
        return not self.lost


# -- starting

def start(config, run_id):
    """(wandb's run, whether it is offline)."""
    import wandb  # slow to import, so only when used
    mode, why = where_to(wandb)
    name = config.wandb_run_name or os.environ.get("WANDB_NAME") or os.path.basename(os.path.normpath(config.out_dir))
    options = {key: getattr(config, f"wandb_{key}") or None for key in ("entity", "group", "notes", "job_type")}
    options |= dict(project=config.wandb_project or os.environ.get("WANDB_PROJECT") or PROJECT, id=run_id, name=name,
                    dir=config.out_dir, config=settings_and_facts(config),
                    tags=[tag.strip() for tag in config.wandb_tags.split(",") if tag.strip()] or None,
                    settings=wandb.Settings(silent=True, init_timeout=INIT_TIMEOUT, finish_timeout=FINISH_TIMEOUT,
                                            finish_timeout_raises=True))
    try:
        run = wandb.init(mode=mode, **options, **({"resume": "allow"} if mode == "online" else {}))
    except Exception as e:
        mode, why = "offline", first_line(e)
        wandb.teardown()  # its service still holds the run
        try:
            run = wandb.init(mode=mode, **options)
        except Exception as e:
            raise ConfigError(f"wandb_project={options['project']!r}: wandb does not start: {first_line(e)}; another name, or "
                              "--wandb_log=False") from None
    if mode == "offline":
        log.say(f"wandb: offline ({why}); to send the run: {sync_command(run)}")
    elif run.url:
        log.say(f"wandb: {run.url}")
    run.define_metric("tokens")
    for section in ("train", "val", "batch", "gns", "step_time"):
        run.define_metric(f"{section}/*", step_metric="tokens")
    run.define_metric("detail/*", step_metric="tokens", summary="none")  # or they would fill the table of runs
    return run, mode == "offline"


def where_to(wandb):
    """(mode, why): what the user asked wandb for, else online if wandb itself finds a key. It is not asked to use the key."""
    asked = wandb.setup(settings=wandb.Settings(silent=True)).settings.mode  # WANDB_MODE, or what `wandb offline` wrote
    if asked != "online":
        return asked, "asked for"
    try:
        return ("online", "") if wandb.login(prompt=False, verify=False) else ("offline", "no key; wandb login stores one")
    except Exception as e:  # a key that cannot be one
        return "offline", first_line(e)


def first_line(error):
    return (str(error) or type(error).__name__).splitlines()[0]


def replace_offline(run):
    """Remove older offline folders of the same run: all that they hold has been sent again."""
    own = os.path.realpath(folder_of(run))
    for old in glob.glob(os.path.join(glob.escape(os.path.dirname(own)), f"offline-run-*-{glob.escape(run.id)}")):
        if os.path.realpath(old) != own:
            shutil.rmtree(old, ignore_errors=True)


def folder_of(run):
    return os.path.dirname(os.path.normpath(run.dir))


def sync_command(run):
    """To be typed where the user is."""
    tool = "wandb" if shutil.which("wandb") else f"{shlex.quote(sys.executable)} -m wandb"
    near = os.path.relpath(folder_of(run))
    return f"{tool} sync {shlex.quote(folder_of(run) if near.startswith('..') else near)}"


# -- what is sent


def values_of(row, block_size):
    """A row under wandb's names; what is undetermined is left out."""
    values = {name: value for key, value in row.items() if value is not None and (name := log_keys.in_wandb(key))}
    return values | ({"batch/tokens": row["batch_size"] * block_size} if row.get("batch_size") else {})


def settings_and_facts(config):
    """The run's settings, with what `auto` became, and the rest of config.json: parameters, commit, versions, data."""
    facts = {}
    with contextlib.suppress(ConfigError, OSError):
        facts = configurator.read_facts(config.out_dir)[1]
    sizes = schedule.kind(config).sizes(config) or [config.batch_size]
    ends = dict.fromkeys((min(sizes), max(sizes)))
    span, tokens = " to ".join(map(str, ends)), " to ".join(log.count(b * config.block_size) for b in ends)
    return {**vars(config), **facts, "schedule": {
        "batch": f"{config.batch_schedule}: {span} sequences, {tokens} tokens",
        "learning_rate": f"{config.lr_decay}: {config.learning_rate:g} to {config.min_lr:g}, warm-up of "
                         f"{log.count(config.warmup_tokens)} tokens",
        "tokens": config.max_tokens}}


def summary(out_dir):
    """The numbers of a run that its line in a table of runs should have."""
    rows = log.read(out_dir)
    steps, losses = [r for r in rows if "train/loss" in r], [r["val/loss"] for r in rows if r.get("val/loss") is not None]
    numbers = {"val_loss_best": min(losses), "val_loss_final": losses[-1]} if losses else {}
    if steps:
        numbers |= {"steps": steps[-1]["step"], "tokens": steps[-1]["tokens"], "hours": steps[-1]["seconds"] / 3600}
    noise, _ = reader.newest_noise(steps)
    if noise:
        numbers |= named("noise_scale", noise.triple) | {"noise_scale_of": noise.of}
    with contextlib.suppress(ConfigError):
        right = predict.of_run(out_dir)[0]["right_batch"]
        numbers |= {"right_batch_for_tokens": right["tokens"]}
        if right["time"]:
            numbers |= named("right_batch_for_time", [right["time" + end] for end in ("", "_low", "_high")])
    return numbers


def media(config, words):
    """The run's picture and its closing words."""
    import wandb
    picture = os.path.join(config.out_dir, "report.png")
    pictures = {"report/picture": wandb.Image(picture)} if os.path.isfile(picture) else {}
    return pictures | {"report/closing_words": wandb.Html(f"<pre>{html.escape(words.strip())}</pre>", inject=False)}


# -- sending a run afterwards


def known_id(out_dir):
    """wandb's name of a run: from its checkpoint, or from wandb's folders there."""
    if checkpoint.saved_in(out_dir) and (saved := checkpoint.load(out_dir, mmap=True)["state"].get("wandb_id")):
        return saved
    folders = sorted(glob.glob(os.path.join(glob.escape(out_dir), "wandb", "*run-*-*")), key=os.path.getmtime)
    return os.path.basename(folders[-1]).split("-", 3)[-1] if folders else None


def main(argv=None):
    from plots import report, style
    from trainer import summary as closing
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 1 or argv[0].startswith("-"):
        print(__doc__.strip())
        return 0 if argv in (["-h"], ["--help"]) else 2
    config = configurator.read_run(argv[0])
    config.out_dir = argv[0]
    with files.only_writer(argv[0], ConfigError):
        rows = log.read(argv[0])
        words = closing.closing(config, style.attempt(report.draw, argv[0]))
        return int(not WandbLog(config, known_id(argv[0]), rows).close(words))


if __name__ == "__main__":
    with one_line():
        sys.exit(main())
