"""The table of log keys (trainer/log_keys.py) against what runs write, in both directions."""

import os

import pytest

import train
from tests.helpers import ROOT, TINY, torchrun
from trainer import log
from trainer.log_keys import GROUPS, KEYS, PARTS, SECTIONS, pattern, rows_of

SHORT = dict(max_tokens=1600, gns_calibrate=True)
RUNS = {
    "norm": dict(SHORT, batch_schedule="gns", beta2_scaling="tokens", weight_decay_scaling="tokens"),
    "exact": dict(SHORT, gns="exact", tie_weights=False, gns_adam=True),
    "crosscheck": dict(SHORT, gns_crosscheck=True, gns_calibrate=False, gns_adam=False),
    "grad_stats": dict(SHORT, grad_stats=True, gns="off"),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory, tiny_data):
    """{run: keys of all its rows}, for small runs that have every setting that adds keys."""
    folder = tmp_path_factory.mktemp("runs")

    def args(name, **settings):
        return [f"--{k}={v}" for k, v in {"dataset": tiny_data, **TINY, "out_dir": folder / name, **settings}.items()]
    for name, settings in RUNS.items():
        assert train.main(args(name, **settings)) == 0
    process = torchrun(2, os.path.join(ROOT, "train.py"), *args("ranks", **SHORT, gns_crosscheck=True, micro_batch_size=2))
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return {name: {key for row in log.read(folder / name) for key in row} for name in [*RUNS, "ranks"]}


@pytest.mark.parametrize("name", [*RUNS, "ranks"])
def test_every_key_that_a_run_writes_is_described_once(written, name):
    assert {key: len(rows_of(key)) for key in written[name]} == dict.fromkeys(written[name], 1)


def test_every_key_group_and_part_of_the_table_is_written_by_some_run(written):
    keys = set().union(*written.values())
    assert [row[0] for row in KEYS if not any(pattern(row[0]).fullmatch(key) for key in keys)] == []
    found = [match.groupdict() for row in KEYS for key in keys if (match := pattern(row[0]).fullmatch(key))]
    assert set(PARTS) == {m["part"] for m in found if "part" in m}
    groups = {m["group"] for m in found if "group" in m}
    assert groups == {group.replace("{i}", str(i)) for group in GROUPS for i in range(2)}  # two blocks


def test_a_key_that_nobody_described_is_not_found():
    for key in ("gns/norms", "gns/block_x", "grad/norm_after_", "gns/norm_lower", "train/los"):
        assert rows_of(key) == []


def test_every_row_has_a_meaning_and_a_section():
    assert len({row[0] for row in KEYS}) == len(KEYS)
    assert all(meaning and section in SECTIONS for _, _, meaning, section, *_ in KEYS)
