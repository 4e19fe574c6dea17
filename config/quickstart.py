# What `python train.py` runs: every other value is the default in configurator.py (python train.py --help).
# A byte-level GPT on the Python standard library's own source, about two minutes on two CPU cores.
