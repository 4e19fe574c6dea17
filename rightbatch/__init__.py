"""The gradient noise scale, measured while a model trains: `from rightbatch import watch`."""

import importlib
import sys

for _name in ("gns", "ln_kernel", "per_example"):
    try:
        importlib.import_module(f"rightbatch.{_name}")  # an installed package
    except ModuleNotFoundError:  # a checkout: the top-level file, under both names, so that it exists once
        sys.modules[f"rightbatch.{_name}"] = globals()[_name] = importlib.import_module(_name)

_PUBLIC = {"watch": "watch", "Watch": "watch", "WatchError": "recognise", "verify": "verify", "WatchCallback": "callbacks"}


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rightbatch' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rightbatch.{_PUBLIC[name]}"), name)
    globals()[name] = value  # importing rightbatch.watch put the module under the function's name
    return value
