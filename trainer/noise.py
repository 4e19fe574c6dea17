"""
Which noise scale a run goes by: decided here for the controller, the terminal, the summary, pictures and predictions. It is the
whole model's, measured (gns=exact) or the norm layers' times a measured factor (gns_calibrate_tokens), in the metric that
gns_metric names. The norm layers' own is never taken for it. It stands in every log row as gns, gns_low and gns_high.
"""

WORDS = {"gns/total": "the whole model", "gns/calibrated": "the whole model",
         "gns/total_adam": "the whole model in Adam's metric", "gns/calibrated_adam": "the whole model in Adam's metric"}


def noise_key(config):
    """The log key of the noise scale that this run goes by, or None where it measures none of the whole model."""
    if config.gns == "off" or (config.gns == "norm" and not config.gns_calibrate_tokens):
        return None
    return ("gns/total" if config.gns == "exact" else "gns/calibrated") + ("_adam" if metric(config) == "adam" else "")


def metric(config):
    """gns_metric, where the run measures in it: Muon has no second moment, and fsdp never holds all of Adam's."""
    unmeasured = not config.gns_adam or config.optimizer != "adamw" or config.parallel == "fsdp"
    return "plain" if unmeasured else config.gns_metric


def noise(row, key="gns"):
    """(noise scale, low, high) of a row, or None while undetermined."""
    key = source(row) if key == "gns" and key not in row else key  # a log without a key of its own for it
    return None if row.get(key) is None else (row[key], row[f"{key}_low"], row[f"{key}_high"])


def source(row):
    """The key whose value is the row's noise scale."""
    keys = [key for key in WORDS if row.get(key) is not None]
    return next((key for key in keys if row[key] == row.get("gns", row[key])), None)


def words(row):
    """What the row's noise scale is the noise scale of."""
    return WORDS.get(source(row), "the whole model")
