"""Minimal until the packaging lands."""
import sys

import gns
import ln_kernel
import per_example

for _m in (gns, ln_kernel, per_example):
    sys.modules[f"rightbatch.{_m.__name__}"] = _m
