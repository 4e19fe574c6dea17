"""
Tensors of a file that anybody may have written. Every file with tensors goes through here before a number of it is used: a
kernel does not look whether a tensor lies in memory as its shape says, and would write behind its end.

    state = load(path, device, mmap)        # a checkpoint
    state = checked(state, device, size)    # what else was read from `size` bytes of a file

ValueError says what is wrong. What comes back is dictionaries, lists, tuples, plain values and dense tensors.
"""

import collections
import os
import pickletools
import zipfile

import torch

from system import errors

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
BUILDS = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2",
          *(f"torch {name}Storage" for name in ("Float", "Double", "Half", "BFloat16", "Long", "Byte"))}
PLAIN = (bool, int, float, str, type(None))
MOST, DEEPEST = 10**6, 20  # values in a checkpoint, and how deep they lie: a few bytes of a pickle can mean endless ones


def load(path, device, mmap):
    """The contents of a checkpoint. Read through a map, each tensor gets bytes of the file and no others, whatever length the
    file says; without `mmap` it is copied, since a file that is cut while it is mapped ends the process."""
    size = os.path.getsize(path)
    check_archive(path, size)
    return checked(torch.load(path, map_location=device, weights_only=True, mmap=True), device, size, copied=not mmap)


def check_archive(path, size):
    """ValueError unless the archive is one of torch.save's, nothing in it is compressed, and its pickle builds nothing but
    dictionaries and dense tensors. Some other kinds of tensor crash while they are built."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(e.compress_type != zipfile.ZIP_STORED or e.file_size != e.compress_size for e in entries):
            raise ValueError("it is compressed")
        if sum(e.file_size for e in entries) > size:
            raise ValueError("it says that it holds more than it does")
        if len({e.filename.lower() for e in entries}) < len(entries):
            raise ValueError("it holds two files of one name")
        pickled = [e for e in entries if e.filename.endswith("/data.pkl")]
        if len(pickled) != 1:
            raise ValueError("torch.save did not write it")
        for opcode, argument, _ in pickletools.genops(archive.read(pickled[0])):
            if opcode.name in ("GLOBAL", "STACK_GLOBAL", "INST") and argument not in BUILDS:
                raise ValueError(f"it holds {errors.short(argument)}, which no checkpoint does")


def checked(state, device, size, copied=False):
    """The same values in containers of our own. An OrderedDict would bring attributes that load_state_dict obeys."""
    count, spans, device = 0, [], torch.device(device).type

    def own(value, name, depth=0):
        nonlocal count
        count += 1
        if count > MOST or depth > DEEPEST:
            raise ValueError(f"{named(name)}: it is deeper or has more values than any checkpoint")
        if type(value) in (dict, collections.OrderedDict):
            if not all(type(key) in (str, int) for key in value):
                raise ValueError(f"{named(name)} has a key that is no name")
            return {key: own(inner, f"{name}.{key}" if name else str(key), depth + 1) for key, inner in value.items()}
        if type(value) in (list, tuple):
            return type(value)(own(inner, f"{name}.{i}", depth + 1) for i, inner in enumerate(value))
        if type(value) is torch.Tensor:
            bad = trouble(value, device)
            if bad:
                raise ValueError(f"{named(name)} is {bad}")
            storage = value.untyped_storage()
            spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes(), name, value.shape))
            return value
        if type(value) not in PLAIN:
            raise ValueError(f"{named(name)} is a {type(value).__name__}, which no checkpoint holds")
        return value
    values = own(state, "")
    check_memory(sorted(spans), size)
    return copy_of(values, {}) if copied else values


def trouble(tensor, device):
    """Why a kernel must not be given a tensor, in words, or None."""
    if tensor.is_nested or tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in DTYPES:
        return f"a tensor of {str(tensor.dtype).removeprefix('torch.')}, {str(tensor.layout).removeprefix('torch.')}: not dense"
    if tensor.device.type != device:
        return f"on {tensor.device}"
    if tensor.requires_grad or tensor.is_neg() or tensor.is_conj():
        return "a tensor with a history"
    if not tensor.is_contiguous() or tensor.untyped_storage().nbytes() < tensor.numel() * tensor.element_size():
        return f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()}: it does not fill its memory in order"
    return None


def check_memory(spans, size):
    """ValueError where two tensors share memory, other than one matrix of the model under two names (tied weights)."""
    total, end, last = 0, 0, None
    for start, stop, name, shape in spans:
        tied = last and (start, stop, shape) == last[:3] and all(n.startswith("model.") for n in (name, last[3]))
        if start < min(end, stop) and not tied:
            raise ValueError(f"{named(name)} and {named(last[3])} share memory")
        total += 0 if tied else stop - start
        end, last = max(end, stop), (start, stop, shape, name)
    if total > size:
        raise ValueError("its tensors are larger than the file")


def copy_of(value, copies):
    """copies: {address: copy} so far; tied weights stay one tensor."""
    if isinstance(value, dict):
        return {key: copy_of(inner, copies) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copy_of(inner, copies) for inner in value)
    if not (torch.is_tensor(value) and value.is_cpu):
        return value
    if not value.numel():
        return value.clone()
    if value.data_ptr() not in copies:
        copies[value.data_ptr()] = value.clone()
    return copies[value.data_ptr()]


def named(name):
    return errors.short(name or "all of it")
