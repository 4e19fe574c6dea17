"""
Which noise scale a run goes by: decided here for the controller, the terminal, the summary, pictures and predictions. It is the
whole model's, measured (gns=exact) or the norm layers' times a measured factor (gns_calibrate), in the metric that
gns_metric names. The norm layers' own is never taken for it. It stands in every log row as gns, gns_low and gns_high.
The whole model is every weight but the look-up tables (rightbatch/rows.py).
"""

from trainer.step import metric_of_run

WORDS = {"gns/body": "the whole model", "gns/calibrated": "the whole model",
         "gns/total_adam": "the whole model in Adam's metric", "gns/calibrated_adam": "the whole model in Adam's metric",
         "gns/total": "all weights"}  # of earlier logs


def key(config):
    """The log key of the noise scale that this run goes by, or None where it measures none of the whole model."""
    if config.gns == "off" or (config.gns == "norm" and not config.gns_calibrate):
        return None
    adam = metric(config) == "adam"
    if config.gns == "exact":
        return "gns/total_adam" if adam else "gns/body"
    return "gns/calibrated_adam" if adam else "gns/calibrated"


def metric(config):
    """gns_metric, where the run measures in it: Muon has no second moment, and with fsdp no process holds all of Adam's."""
    return metric_of_run(config)


def read(row, key):
    """(value, low, high) of a log row's key, or None while undetermined."""
    values = tuple(row.get(f"{key}{end}") for end in ("", "_low", "_high"))
    return None if None in values else values


def of(row):
    """The noise scale of a log row, (value, low, high), or None while undetermined."""
    return read(row, "gns" if "gns" in row else source(row))


def source(row):
    """The key whose value is the row's noise scale. A log may lack the key gns: then the first that has a value."""
    return next((key for key in WORDS if row.get(key) is not None and row[key] == row.get("gns", row[key])), None)


def words(row):
    """What the row's noise scale is the noise scale of."""
    return WORDS.get(source(row), "the whole model")
