"""The rows of a run as a picture: time and bus bandwidth against size."""

from __future__ import annotations

from collections.abc import Sequence

from fccl.bench.config import YARDSTICKS, Row

__all__ = ["check_plot", "write_plot"]


def check_plot(path: str) -> None:
    """Raises ValueError if no picture can be written to `path`; the message says what is missing."""
    try:
        import matplotlib
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'fccl[bench]'") from None
    del matplotlib
    known = sorted(FigureCanvasBase.get_supported_filetypes())
    ending = path.rpartition(".")[2].lower() if "." in path else ""
    if ending not in known:
        raise ValueError(f"--plot: {path!r} does not end in a kind of picture: {', '.join(known)}")


def write_plot(path: str, title: str, rows: Sequence[Row]) -> None:
    """Draws medians (lines) and minima (dots) of every backend; the ending of `path` says the format.

    Args:
        path: The file.
        title: What stands above.
        rows: The rows of one run.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    from fccl.bench.sizes import format_size

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    figure.suptitle(title)
    time, width = figure.subplots(1, 2)
    for name in dict.fromkeys(row.backend for row in rows):
        own = [row for row in rows if row.backend == name]
        sizes = [row.bytes for row in own]
        style = "--" if name in YARDSTICKS else "-"
        (line,) = time.plot(sizes, [row.median_us for row in own], style, marker=".", label=name)
        time.plot(sizes, [row.min_us for row in own], ":", color=line.get_color(), linewidth=0.8)
        width.plot(sizes, [row.busbw_gbps for row in own], style, marker=".", label=name)
    for axes, text in ((time, "time, µs (dotted: the fastest)"), (width, "bus bandwidth, GB/s")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_size(round(size))))
        axes.tick_params(axis="x", labelrotation=45)
        axes.set_xlabel("size")
        axes.set_ylabel(text)
        axes.grid(alpha=0.3)
    time.set_yscale("log")
    time.legend()
    figure.savefig(path)
