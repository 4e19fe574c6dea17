"""Which noise scale a run goes by."""

NOISE = {"gns/total": "the whole model", "gns/calibrated": "the whole model", "gns/norm": "the norm layers"}


def noise_key(config):
    """The log key that the controller follows: the whole model's noise scale; the norm layers' only if nothing relates
    them to the whole model."""
    if config.gns == "exact":
        return "gns/total"
    return "gns/calibrated" if config.gns_calibrate_tokens else "gns/norm"


def noise(row, key):
    """(noise scale, low, high) of a row, or None while undetermined."""
    return None if row.get(key) is None else (row[key], row[f"{key}_low"], row[f"{key}_high"])


def shown(rows):
    """Which noise scale to show for a run: the best that its newest row has determined, of the whole model if there."""
    newest = next((r for r in reversed(rows) if "gns/norm" in r), {})
    return next((key for key in NOISE if newest.get(key) is not None), "gns/norm")
