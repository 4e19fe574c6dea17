"""
What all pictures share: colours, axes, the rows of a log they are drawn from; and tables, in text.
"""

import io
import os

from system import output
from system.errors import ConfigError, explain, short
from trainer import log

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")  # Okabe & Ito, safe for all eyes
STYLE = {"font.size": 12, "axes.titlesize": 13, "axes.titleweight": "bold", "axes.titlelocation": "left",
         "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
         "legend.frameon": False, "legend.fontsize": 10.5, "lines.linewidth": 1.8}


def positive(values):
    """For a logarithmic axis: what is not above zero is a gap."""
    return [v if v and v > 0 else float("nan") for v in values]


def line(ax, x, y, **how):
    """A line. A point without a neighbour, which a line would not show, is a dot."""
    ax.plot(x, y, **how)
    known = [v is not None and v == v for v in y]
    alone = [i for i, k in enumerate(known) if k and not any(known[max(i - 1, 0):i]) and not any(known[i + 1:i + 2])]
    if alone:
        ax.plot([x[i] for i in alone], [y[i] for i in alone], "o", ms=5, color=how.get("color"), alpha=how.get("alpha"))


def pyplot():
    os.environ["MPLBACKEND"] = "agg"  # a notebook's, or one that is not there, would fail already at the import
    import matplotlib  # slow to import, so only when a picture is drawn
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    plt.rcParams.update(STYLE)
    return plt


def panels(columns, width, height, **how):
    """(figure, its axes side by side)"""
    return pyplot().subplots(1, columns, figsize=(width, height), layout="constrained", **how)


def attempt(draw, *arguments):
    """The path of a picture or, where it cannot be drawn, why not: for who has more to say than the picture shows."""
    try:
        return draw(*arguments)
    except Exception as e:  # matplotlib's, too, which may be anything
        return f"none, it could not be drawn: {explain(e) or short(e)}"


def save(figure, path):
    """All of it or nothing: a full disk leaves the old picture. A device or a pipe is written to."""
    picture = io.BytesIO()
    try:
        figure.savefig(picture, dpi=120, format=os.path.splitext(path)[1][1:].lower() or "png")
    except ValueError as e:
        raise ConfigError(f"--out={path}: {e}") from None
    finally:
        pyplot().close(figure)
    output.write(path, picture.getvalue())


def counts(axis):
    """Label an axis 200k, 1.5M."""
    axis.set_major_formatter(lambda v, _: log.count(v))


def plain(axis):
    """Label an axis 8, 16, 0.5, also where it is logarithmic."""
    axis.set_major_formatter(lambda v, _: f"{v:g}")


def decades(axis, show="{:g}".format):
    """Label a logarithmic axis at 1, 2, 5, 10, 20, 50."""
    axis.set_major_formatter(lambda v, _: show(v))
    axis.set_minor_formatter(lambda v, _: show(v) if f"{v:e}"[0] in "25" else "")


def doublings(ax, ticks=()):
    """An x-axis of batch sizes and the like."""
    ax.set_xscale("log", base=2)
    if len(ticks):
        ax.set_xticks(ticks)
    plain(ax.xaxis)


def dress(ax, title, xlabel=None, x=None, y=None, **more):
    """A panel's title, axes and legend. x and y: "doublings", "log", "counts" (200k), "zero" (from zero on), or as they are."""
    ax.set(title=title, xlabel=xlabel, **more)
    for axis, kind, scale in ((ax.xaxis, x, ax.set_xscale), (ax.yaxis, y, ax.set_yscale)):
        if kind == "doublings":
            scale("log", base=2)
            plain(axis)
        elif kind == "log":
            scale("log")
            decades(axis)
        elif kind == "counts":
            counts(axis)
        elif kind == "zero":
            ax.set_ylim(bottom=0)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=9)


def table(rows, align=str.rjust):
    """Text in columns; rows of strings, the first is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  " + "  ".join(align(text, width) for text, width in zip(row, widths)).rstrip() for row in rows)
