"""The figures that show data: speed and roofline from the record, the map of paths from plan()."""

from __future__ import annotations

import io
from typing import Any

import matplotlib
import record
import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fused_rope_xattn import plan
from fused_rope_xattn.planner import GPU
from fused_rope_xattn.verify.bench import lines_of
from fused_rope_xattn.verify.figures import sweep_figure

matplotlib.use("svg")
pyplot.rcParams.update(
    {
        "svg.fonttype": "none",
        "svg.hashsalt": "fused_rope_xattn",  # the same figure has the same bytes
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)

OURS, PEER = "#00897b", "#9e9e9e"
PATH_COLOURS = {"fused": "#00897b", "split": "#5c6bc0", "composite": "#bdbdbd"}
# NVIDIA's data sheet of the H200 SXM: dense products, and memory.
PEAK_FLOPS = {"bf16": 989e12, "tf32": 494e12}
PEAK_BYTES = 4.8e12
BYTES = {"bf16": 2, "tf32": 4, "fp32": 4}
H200 = GPU("NVIDIA H200", (9, 0), 132)
LENGTHS = tuple(2**n for n in range(4, 14))


def speed() -> str:
    """Time of the best peer over ours, a bar for each problem and pass."""
    lines = [line for row in record.speed() for line in lines_of(row)]
    figure, axes = _axes(7.2, 0.24 * len(lines) + 0.9)
    for at, line in enumerate(reversed(lines)):
        ratio = line.speed_up or 0.0
        axes.barh(at, ratio, color=OURS if ratio >= 1 else PEER, height=0.7)
        axes.text(ratio + 0.03, at, f"{ratio:.2f}", va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    names = [f"{x.name}, {x.direction}" for x in reversed(lines)]
    axes.set_yticks(range(len(lines)), names)
    axes.set_ylim(-0.6, len(lines) - 0.4)
    axes.set_xlabel("time of the best peer over ours (above 1: faster than the peer)")
    return _svg(figure)


def roofline() -> str:
    """Forward passes: achieved arithmetic against what must move between memory and chip."""
    figure, axes = _axes(7.2, 4.4)
    intensity = [2**n for n in range(2, 13)]
    for dtype, peak in PEAK_FLOPS.items():
        roof = [min(peak, x * PEAK_BYTES) / 1e12 for x in intensity]
        axes.plot(intensity, roof, color="black", linewidth=1)
        axes.text(intensity[-1], peak / 1e12 * 1.06, f"{dtype} peak", ha="right", fontsize=8)
    for row in record.speed():
        case = row["case"]
        if case["dtype"] not in PEAK_FLOPS:
            continue
        ours = row["passes"]["forward"]["fused_rope_xattn"]["us"] * 1e-6
        flops = 2 * _products(case)
        x, y = flops / (_elements(case) * BYTES[case["dtype"]]), flops / ours / 1e12
        axes.plot(x, y, "o", color=OURS, markersize=5)
        axes.annotate(case["name"], (x, y), xytext=(5, -9), textcoords="offset points", fontsize=8)
    axes.set(xscale="log", yscale="log")
    axes.set_xlabel("multiplications and additions for each byte of arguments and results")
    axes.set_ylabel("TFLOP/s of the whole forward")
    axes.grid(True, which="major", linewidth=0.3)
    return _svg(figure)


def sweep() -> str:
    """Ratios over a grid of sizes, as ``bench --render FILE --plot`` draws them."""
    return _svg(sweep_figure(record.read("sweep")["rows"], "Eager SDPA in CUDA graphs over ours"))


def paths_map() -> str:
    """Which path plan() takes for the baseline's widths at any lengths, on an H200."""
    figure, panels = pyplot.subplots(1, 2, figsize=(7.2, 3.4), sharey=True, layout="constrained")
    for axes, dtype in zip(panels, (torch.bfloat16, torch.float32), strict=True):
        for row, queries in enumerate(LENGTHS):
            for column, keys in enumerate(LENGTHS):
                colour = PATH_COLOURS[_path(queries, keys, dtype)]
                axes.add_patch(pyplot.Rectangle((column, row), 0.94, 0.94, color=colour))
        axes.set_xticks([c + 0.5 for c in range(len(LENGTHS))], LENGTHS, rotation=60)
        axes.set_yticks([r + 0.5 for r in range(len(LENGTHS))], LENGTHS)
        axes.set(xlim=(0, len(LENGTHS)), ylim=(0, len(LENGTHS)), xlabel="keys")
        axes.set_title(str(dtype).removeprefix("torch."))
    panels[0].set_ylabel("queries")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=PATH_COLOURS[p]) for p in ("fused", "split")]
    figure.legend(handles, ("fused", "split"), loc="outside lower center", ncols=2, frameon=False)
    return _svg(figure)


def _path(queries: int, keys: int, dtype: torch.dtype) -> str:
    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta", dtype=dtype)

    weights = [empty(256, 256) for _ in range(4)]
    found = plan(empty(4, queries, 256), empty(4, keys, 256), *weights, num_heads=8, gpu=H200)
    return found.path


def _products(case: dict[str, Any]) -> float:
    """Multiply-adds of a forward: projections, scores, values, output."""
    inner, kv_inner, width, out, kv_width, value_width = _widths(case)
    queries, keys = case["B"] * case["Tq"], case["B"] * case["Tk"]
    kv = 0 if case["projected"] else keys * kv_inner * (kv_width + value_width)
    return queries * inner * (width + out + 2 * case["Tk"]) + kv


def _elements(case: dict[str, Any]) -> float:
    """Arguments and results, each read or written once."""
    inner, kv_inner, width, out, kv_width, value_width = _widths(case)
    queries, keys = case["B"] * case["Tq"], case["B"] * case["Tk"]
    total = queries * (width + out) + inner * (width + out)
    if case["projected"]:
        return total + 2 * keys * kv_inner
    tokens = kv_width + (value_width if case["Dv"] else 0)
    return total + keys * tokens + kv_inner * (kv_width + value_width)


def _widths(case: dict[str, Any]) -> tuple[int, int, int, int, int, int]:
    kv_width = case["Dkv"] or case["Dq"]
    inner, kv_inner = case["H"] * case["D"], (case["Hkv"] or case["H"]) * case["D"]
    return inner, kv_inner, case["Dq"], case["Dout"] or case["Dq"], kv_width, case["Dv"] or kv_width


def _axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    return figure, axes


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)
    return out.getvalue()
