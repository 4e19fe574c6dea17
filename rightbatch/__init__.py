"""What `pip install` brings: the noise scale, the norm layers that measure it, and per-example norms of other layers.

An installed package has gns.py, ln_kernel.py and per_example.py among its files. In a checkout they lie beside it, so they are
taken from there, under both names: each module, and each custom op in it, exists once, whichever name is imported first.
"""

import importlib
import importlib.util
import sys
from pathlib import Path


def _take_from_checkout(name, path):
    module = sys.modules.get(name)
    if module is None or Path(getattr(module, "__file__", None) or "").resolve() != path:
        spec = importlib.util.spec_from_file_location(name, path)
        ours = importlib.util.module_from_spec(spec)
        if module is None:   # else it is somebody else's module of the same name: theirs stays where it is
            sys.modules[name] = ours
        try:
            spec.loader.exec_module(ours)
        except BaseException:
            if sys.modules.get(name) is ours:
                del sys.modules[name]
            raise
        module = ours
    sys.modules[f"{__name__}.{name}"] = module


for _name in ("gns", "ln_kernel", "per_example"):
    if not Path(__file__).with_name(f"{_name}.py").exists():
        _take_from_checkout(_name, Path(__file__).resolve().parent.parent / f"{_name}.py")
    globals()[_name] = importlib.import_module(f"{__name__}.{_name}")

# Last, and not when first asked for: importing the modules watch and verify puts them under these names, then the functions.
from rightbatch.recognise import WatchError  # noqa: E402, F401
from rightbatch.verify import verify  # noqa: E402, F401
from rightbatch.watch import Watch, watch  # noqa: E402, F401


def __getattr__(name):
    if name != "WatchCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rightbatch.callbacks import WatchCallback
    return WatchCallback
