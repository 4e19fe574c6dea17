"""Two tables of the attack, of an older version and of this one, as one result (results/attack.json)."""

import json

COLUMNS = ("tried", "survived", "refused", "failed")


def read(path):
    """What attack.py --out wrote."""
    with open(path) as f:
        found = json.load(f)
    if not {"cases", "seed", "machine", "kinds"} <= found.keys():
        raise SystemExit(f"--before={path}: not what attack.py --out writes")
    return found


def total(kinds):
    return {key: sum(row[key] for row in kinds.values()) for key in COLUMNS}


def join(before, after):
    """Kinds that one of the two did not try stay, with nothing on its side. What went wrong is left to the tables of each."""
    kinds = list(dict.fromkeys([*before["kinds"], *after["kinds"]]))
    both = {kind: {name: {key: found["kinds"][kind][key] for key in COLUMNS} if kind in found["kinds"] else None
                   for name, found in (("before", before), ("after", after))} for kind in kinds}
    return {"command": f"python tests/attack/attack.py --cases={after['cases']} --seed={after['seed']}", "date": after["date"],
            "machine": after["machine"], "finding": finding(before, after), "notes": notes(before, after),
            "before": {"commit": before["machine"]["commit"], "cases": before["cases"], "seed": before["seed"]}, "kinds": both}


def finding(before, after):
    def words(found):
        t = total(found["kinds"])
        return (f"of {t['tried']:,} cases {t['survived']:,} survived bit for bit, {t['refused']:,} were refused in one line, "
                f"{t['failed']:,} failed")
    alike = "the same number of cases" if before["cases"] == after["cases"] else "another number of cases"
    seed = "the same seed" if before["seed"] == after["seed"] else "another seed"
    return f"The same kinds of cases, {alike} and {seed}. Before: {words(before)}. After: {words(after)}."


def notes(before, after):
    lines = [f"Before is commit {before['machine']['commit']}, attacked with --root.",
             "The attack is younger than the mended code: it knows what was found wrong there. A case that nobody thought of "
             "is not in it."]
    for kind, row in before["kinds"].items():
        if row.get("left_out"):
            lines.append(f"{kind}: before has no {', '.join(row['left_out'])}; those cases went to the other commands.")
    missing = [kind for kind in after["kinds"] if kind not in before["kinds"] or not before["kinds"][kind]["tried"]]
    return lines + ([f"Not tried before: {', '.join(missing)}."] if missing else [])
