"""Cases of the attack in which a file is what somebody made to do harm: a checkpoint of which every checksum fits."""

import contextlib
import io
import os
import pickle
import pickletools
import random
import shutil
import signal
import socket
import struct
import warnings
import zipfile
import zlib
from collections import OrderedDict

import torch

from tests.attack.around import Around
from tests.attack.harness import CHECKPOINTS, HOSTILE, flip


class Hostile(Around):
    def mutants(self):
        """A checkpoint whose tensors, pickle or archive are not what torch.save writes: refused in one line, or of no harm."""
        out = self.folder(self.stopped)
        for name in CHECKPOINTS[1:]:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(out, name))
        how, fresh = made(os.path.join(out, CHECKPOINTS[0]), self.rng), f"{out}-fresh"
        child = self.rng.choice([lambda: self.train(out, stop_tokens=3300)] * 5 + [
            lambda: self.command("sample", out, "--tokens=3", "--prompt=\x01"),
            lambda: self.command("export", out, f"--hf={fresh}"), lambda: self.command("train", out, "--eval"),
            lambda: self.train(fresh, branch_from=out, stop_tokens=3300)])()
        child.answered(how, codes=(0, 1))

    def specials(self):
        """A pipe, a socket, a device, a folder or a link that leads nowhere in the place of a file: never waited for."""
        rng, data, cache, fresh = self.rng, self.folder(self.data), self.folder(), self.folder()
        out = self.folder(rng.choice([self.whole, self.stopped]))
        os.mkdir(cache, 0o700)
        for name in os.listdir(CACHE) if os.path.isdir(CACHE) else ():
            if name.endswith((".so", ".sha256")):
                shutil.copy(os.path.join(CACHE, name), cache)
        schedule = os.path.join(out, "schedule.txt")
        with open(schedule, "w") as f:
            f.write("0 4\n")
        names = ["lock", "log.jsonl", *CHECKPOINTS, "config.json", "step_time.json", "report.png"]
        paths = [*(os.path.join(out, name) for name in [*names, *names, "schedule.txt"]), out,
                 *(os.path.join(data, name) for name in ("train.bin", "val.bin", "meta.json", "verified.json", "meta.pkl")),
                 *(os.path.join(cache, name) for name in [*os.listdir(cache), "lock"])]
        path, kind = rng.choice(paths), rng.choice(list(SPECIALS))
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, f"{path}.moved")
        SPECIALS[kind](path)
        keys = {"dataset": data, "env": {"RIGHTBATCH_CACHE": cache}}
        keys |= {"batch_schedule": "file", "batch_file": schedule} if path == schedule else {}
        asked = [("sample", out, "--tokens=3"), ("plot", out, f"--out={fresh}"), ("whatif", out, "--json=-"),
                 ("export", out, f"--hf={fresh}"), ("train", out, "--eval")]
        child = rng.choice([*[lambda: self.train(out, **keys)] * 6, lambda: self.train(fresh, **keys),
                            lambda: self.train(fresh, branch_from=out, **keys), lambda: self.train(fresh, more=[path], **keys),
                            *[lambda: self.some_command(asked, env=keys["env"])[0]] * 5])()
        child.answered(f"{kind} as {os.path.basename(path)}", codes=(0, 1), seconds=30)


def socket_at(path):
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(path)


CACHE = os.environ.get("RIGHTBATCH_CACHE") or os.path.expanduser("~/.cache/rightbatch")
SPECIALS = {"a pipe": os.mkfifo, "a socket": socket_at, "a folder": os.mkdir,
            "a link to a device": lambda path: os.symlink("/dev/zero", path),
            "a link to nowhere": lambda path: os.symlink("nowhere", path),
            "a link to itself": lambda path: os.symlink(os.path.basename(path), path)}


# -- a checkpoint that is not what it seems

# a tensor that cannot be made of this one, or not be saved
NO_SUCH = RuntimeError, TypeError, ValueError, IndexError, AttributeError, pickle.PicklingError


def made(path, rng):
    """Make a mutant of the checkpoint at `path`, in a process of its own: torch itself may crash on such tensors. In words."""
    while True:
        seed, (reader, writer) = rng.getrandbits(64), os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(10)  # a list of all numbers of a tensor that claims to be huge
            with contextlib.suppress(BaseException), open(path, "r+b") as f:
                how, data = mutant(f.read(), random.Random(seed))
                os.write(writer, how.encode()[:4000])
                f.seek(0)
                f.truncate()
                f.write(data)
            os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        with open(reader, encoding="utf-8", errors="replace") as f:
            how = f.read()
        if how:
            return how


def mutant(data, rng):
    """(what was done to it, the bytes of a checkpoint whose checksum fits)."""
    from trainer import checkpoint
    whole = data[:-len(checkpoint.MARK) - 8]
    how = rng.choice(["tensor"] * 4 + ["value", "pickle", "pickle", "archive"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            words, changed = globals()[f"{how}_changed"](whole, rng)
    except NO_SUCH:
        return mutant(data, rng)
    return f"{how} {words}", changed + checkpoint.MARK + b"%08x" % zlib.crc32(changed)


def tensor_changed(whole, rng):
    state = torch.load(io.BytesIO(whole), weights_only=True)
    places = [(where, key) for where in dictionaries(state) for key, value in where.items() if torch.is_tensor(value)]
    words = []
    for _ in range(rng.choice([1, 1, 2, 50])):
        (where, key), (there, other) = rng.sample(places, 2)
        kind = rng.choice(list(TENSORS))
        with contextlib.suppress(*NO_SUCH):
            where[key] = TENSORS[kind](where[key], there[other])
            words.append(f"{key} {kind}")
    file = io.BytesIO()
    torch.save(state, file)
    return words[:3], file.getvalue()


def subclass(t, other):
    class Sub(torch.Tensor):
        pass
    globals()["Sub"], Sub.__qualname__ = Sub, "Sub"
    return t.as_subclass(Sub)


TENSORS = {  # of such a tensor, and another of the checkpoint
    "expanded": lambda t, other: t.flatten()[:1].expand(t.numel()).view(t.shape) if t.dim() < 2 else
    t.flatten()[0].expand(t.shape),
    "rows expanded": lambda t, other: t[:1].expand(t.shape),
    "transposed": lambda t, other: t.t().contiguous().t() if t.dim() == 2 else t.repeat_interleave(2)[::2],
    "overlapping": lambda t, other: t.new_zeros(t.numel() + 1).as_strided(t.shape, [1] * t.dim()),
    "a scalar": lambda t, other: t.flatten()[0].clone(),
    "one element": lambda t, other: t.flatten()[:1].clone(),
    "empty": lambda t, other: t.new_zeros(0),
    "empty and huge": lambda t, other: t.new_zeros((0, 2**40)),
    "huge": lambda t, other: t.new_zeros(1).expand(2**40),
    "longer": lambda t, other: t.new_zeros((2, *t.shape)),
    "shared": lambda t, other: other,
    "a part of another": lambda t, other: other.flatten()[:t.numel()].view(t.shape),
    "a view of more": lambda t, other: torch.cat([t.flatten(), t.flatten()])[t.numel():].view(t.shape),
    "sparse": lambda t, other: t.to_sparse(),
    "CSR": lambda t, other: t.to_sparse_csr(),
    "CSC": lambda t, other: t.to_sparse_csc(),
    "a parameter": lambda t, other: torch.nn.Parameter(t.clone()),
    "a buffer": lambda t, other: torch.nn.Buffer(t.clone()),
    "with a gradient": lambda t, other: t.clone().requires_grad_(),
    "quantised": lambda t, other: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.quint8),
    "quantised by channel": lambda t, other: torch.quantize_per_channel(
        t.float(), torch.ones(len(t)), torch.zeros(len(t)), 0, torch.qint8),
    "nested": lambda t, other: torch.nested.nested_tensor([t.clone(), t.clone()]),
    "jagged": lambda t, other: torch.nested.nested_tensor([t.clone(), t.clone()], layout=torch.jagged),
    "meta": lambda t, other: t.to("meta"),
    "complex": lambda t, other: t.to(torch.complex64),
    "conjugated": lambda t, other: t.to(torch.complex64).conj(),
    "negated": lambda t, other: torch._neg_view(t.clone()),
    "a subclass": subclass,
    "MKLDNN": lambda t, other: t.to_mkldnn(),
    "float8": lambda t, other: t.to(torch.float8_e5m2),
    "bool": lambda t, other: t.to(torch.bool),
    "int64": lambda t, other: t.to(torch.int64),
    "uint16": lambda t, other: t.to(torch.uint16),
    "float64": lambda t, other: t.double(),
    "bfloat16": lambda t, other: t.bfloat16(),
    "not finite": lambda t, other: torch.full_like(t, float("nan")),
    "all bits": lambda t, other: torch.full_like(t, 255 if t.dtype == torch.uint8 else -3e38),
    "a list": lambda t, other: t.tolist(),
    "a storage": lambda t, other: t.untyped_storage()}


def dictionaries(value):
    """All dictionaries in it."""
    inner = list(value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ())
    return [*([value] if isinstance(value, dict) else []), *(d for v in inner for d in dictionaries(v))]


def value_changed(whole, rng):
    """What torch.load takes beside tensors: endless values, keys that are no names, attributes, groups of the optimizer."""
    state = torch.load(io.BytesIO(whole), weights_only=True)
    where = rng.choice(dictionaries(state))
    kind = rng.choice(["endless", "itself", "deep", "key", "set", "attributes", "group"])
    key = rng.choice([*where, "new"])
    if kind == "endless":
        where[key] = [1]
        for _ in range(60):
            where[key] = [where[key], where[key]]
    elif kind == "itself":
        where[key] = where
    elif kind == "deep":
        for _ in range(300):
            where[key] = [where.get(key)]
    elif kind == "key":
        where[rng.choice([1.5, None, (1, 2), torch.zeros(2), 10**400, "\n" * 9999])] = 1
    elif kind == "set":
        where[key] = rng.choice([{1}, torch.Size([2]), torch.float32, torch.device("cpu"), bytearray(3), 1j, 10**5000])
    elif kind == "attributes":  # which load_state_dict obeys: the file's own tensors become the parameters
        model = OrderedDict((name, t.flatten()[:1].expand(t.numel()).view(t.shape) if t.dim() < 2 else t[:1].expand(t.shape))
                            for name, t in state["model"].items())
        model._metadata = {name.rpartition(".")[0]: {"assign_to_params_buffers": True} for name in model}
        state["model"] = model
    else:
        group = rng.choice(state["optimizer"]["param_groups"])
        group[rng.choice(list(group))] = rng.choice([*HOSTILE, torch.zeros(3), [0] * 50, {0: 1}])
    file = io.BytesIO()
    torch.save(state, file)
    return kind, file.getvalue()


def pickle_changed(whole, rng):
    """Sizes, strides, offsets and lengths that lie; instructions that are others."""
    files = unpacked(whole)
    name, = (n for n in files if n.endswith("/data.pkl"))
    data, kind = bytearray(files[name]), rng.choice(["number", "number", "number", "byte", "cut", "name"])
    for _ in range(rng.choice([1, 1, 3])):
        ops = list(pickletools.genops(bytes(files[name])))
        if kind == "number":
            sizes = {"BININT1": "<B", "BININT2": "<H", "BININT": "<i"}
            opcode, _, at = rng.choice([op for op in ops if op[0].name in sizes])
            width = struct.calcsize(sizes[opcode.name])
            data[at + 1:at + 1 + width] = rng.choice([b"\0", b"\1", b"\xff", b"\x7f"]) * width
        elif kind == "byte":
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind == "cut":
            del data[rng.randrange(len(data)):]
        else:
            old = rng.choice([b"FloatStorage", b"_rebuild_tensor_v2", b"ByteStorage"])
            names = (b"DoubleStorage LongStorage ComplexDoubleStorage QInt8Storage UntypedStorage _rebuild_sparse_tensor "
                     b"Tensor _rebuild_parameter _rebuild_qtensor _rebuild_nested_tensor _rebuild_meta_tensor_no_storage "
                     b"_rebuild_device_tensor_from_numpy _rebuild_tensor_v3 _rebuild_wrapper_subclass").split()
            data = bytearray(bytes(data).replace(old, rng.choice(names)))
    return kind, packed({**files, name: bytes(data)})


def archive_changed(whole, rng):
    """Records that are compressed, shorter or longer than is said, twice there, or gone; the archive's own bytes."""
    files = unpacked(whole)
    name, kind = rng.choice(list(files)), rng.choice(["compressed", "zeros", "cut", "gone", "twice", "order", "bytes", "lies"])
    if kind == "bytes":
        start = whole.index(b"PK\1\2") if rng.random() < 0.7 else 0
        for _ in range(rng.choice([1, 1, 5])):
            whole = whole[:start] + flip(whole[start:], rng)
        return kind, whole
    if kind == "lies":  # the directory says that a record is longer
        at = whole.index(b"PK\1\2") + 20
        return kind, whole[:at] + struct.pack("<II", 2**31, 2**31) + whole[at + 8:]
    if kind == "zeros":
        files[name] = bytes(5 * 10**7)
    elif kind == "cut":
        files[name] = files[name][:len(files[name]) // 2]
    elif kind == "gone":
        del files[name]
    elif kind == "order":
        files[next(iter(files)).partition("/")[0] + "/byteorder"] = rng.choice([b"big", b"", b"x"])
    return kind, packed(files, kind in ("compressed", "zeros"), name if kind == "twice" else None)


def unpacked(whole):
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        return {e.filename: archive.read(e) for e in archive.infolist()}


def packed(files, compressed=False, twice=None):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED, compresslevel=1) as archive:
        for name, data in [*files.items(), *([(twice, b"x" * 64)] if twice else [])]:
            archive.writestr(name, data)
    return file.getvalue()
