"""
Numbers and batch schedules as people write them: 50M, "0:32, 50M:64", two columns of a file. ValueError says what is wrong.
"""

from decimal import Decimal, DecimalException

SUFFIXES = {"k": 10**3, "M": 10**6, "B": 10**9}


def parse_count(text) -> int:
    """'50M' -> 50000000; k, M and B are thousands, millions and billions."""
    text = str(text).strip()
    number, size = (text[:-1], SUFFIXES[text[-1]]) if text[-1:] in SUFFIXES else (text, 1)
    try:
        value = Decimal(number.replace("_", "")) * size
        whole = value.is_finite() and 0 <= value < 10**18 and value == int(value)
    except DecimalException:
        whole = False
    if not whole:
        raise ValueError(f"'{text[:40]}' is not a whole number such as 200, 50k, 1.5M or 2B")
    return int(value)


def parse_steps(text, quantum):
    """[(tokens, batch)] of '0:32, 50M:64'"""
    points = []
    for part in text.split(","):
        start, colon, batch = part.partition(":")
        if not colon:
            raise ValueError(f"'{part.strip()}' is not tokens:batch; expected a list such as 0:32, 50M:64, 200M:128")
        add(points, start, batch, quantum)
    if points[0][0] != 0:
        raise ValueError(f"the first batch must start at 0 tokens, not at {points[0][0]}")
    return points


def parse_file(text, quantum):
    """[(tokens, batch)] of a two-column text; # begins a comment."""
    points = []
    for number, line in enumerate(text.splitlines(), 1):
        columns = line.partition("#")[0].split()
        try:
            if len(columns) not in (0, 2):
                raise ValueError(f"'{line.strip()}' is not two columns, tokens and batch")
            if columns:
                add(points, *columns, quantum)
        except ValueError as e:
            raise ValueError(f"line {number}: {e}") from None
    if not points:
        raise ValueError("it has no line with tokens and batch")
    return points


def add(points, tokens, batch, quantum):
    """Append a point. Tokens must increase, batches must be whole quanta."""
    tokens, batch = parse_count(tokens), parse_count(batch)
    if points and tokens <= points[-1][0]:
        raise ValueError(f"tokens must increase, but {tokens} comes after {points[-1][0]}")
    if batch < quantum or batch % quantum:
        below = batch // quantum * quantum
        near = f"{below} or {below + quantum}" if below else f"{quantum}"
        raise ValueError(f"a batch of {batch} is not whole micro-batches of {quantum} (over all processes): take {near}")
    points.append((tokens, batch))
