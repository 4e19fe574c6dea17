"""What `pip install` brings: the noise scale, the norm layers that measure it, and per-example norms of other layers.

An installed package has gns.py and ln_kernel.py among its files. In a checkout they lie beside the package, at the top level,
where `import gns` finds them, too: each module, and each custom op in it, exists once, under one name.
"""

from pathlib import Path
from typing import TYPE_CHECKING

if not Path(__file__).with_name("gns.py").exists():
    import gns
    import ln_kernel
    for module in (gns, ln_kernel):
        if Path(str(module.__file__)).parent != Path(__file__).parent.parent:
            raise ImportError(f"rightbatch needs its own {module.__name__}.py, and {module.__file__} comes before it on "
                              "sys.path: rename that file")
else:
    from rightbatch import gns, ln_kernel

# Last, and not when first asked for: importing the modules watch and verify puts them under these names, then the functions.
from rightbatch import per_example
from rightbatch.recognise import WatchError
from rightbatch.verify import verify
from rightbatch.watch import Watch, watch

if TYPE_CHECKING:
    from rightbatch.callbacks import WatchCallback

__version__ = "0.1.0"
__all__ = ["Watch", "WatchCallback", "WatchError", "gns", "ln_kernel", "per_example", "verify", "watch"]


def __getattr__(name):
    if name != "WatchCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rightbatch.callbacks import WatchCallback
    return WatchCallback
