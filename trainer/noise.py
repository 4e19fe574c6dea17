"""
Which noise scale a run goes by. The whole model's is the one that tells a batch; it is measured (gns=exact), or the norm
layers' times a measured factor (gns_calibrate_tokens). The norm layers' own stands in where nothing relates the two.
"""

# from the best to the next best: log key, and what it is the noise scale of
NOISE = {"gns/total": "the whole model", "gns/calibrated": "the whole model", "gns/norm": "the norm layers"}


def noise_key(config):
    """The log key that the controller follows: always the same in a run, so it waits until that one is determined."""
    if config.gns == "exact":
        return "gns/total"
    return "gns/calibrated" if config.gns_calibrate_tokens else "gns/norm"


def shown(rows):
    """The log key to show for a run: the best that its newest row has determined."""
    newest = next((r for r in reversed(rows) if "gns/norm" in r), {})
    return next((key for key in NOISE if newest.get(key) is not None), "gns/norm")


def noise(row, key):
    """(noise scale, low, high) of a row, or None while undetermined."""
    return None if row.get(key) is None else (row[key], row[f"{key}_low"], row[f"{key}_high"])
