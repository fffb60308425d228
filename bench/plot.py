"""Draw a run of `bench.serving` as one SVG: a panel a figure, a bar a contestant.

python -m bench.plot FILE.svg < serving.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams |= {
    "svg.fonttype": "none",
    "svg.hashsalt": "tokenflow",
    "font.size": 8,
    "font.family": "sans-serif",
}

import matplotlib.pyplot as plt  # noqa: E402  (the backend comes first)

PANELS = (
    ("paced_500", "cpu_us_per_token", "CPU µs a token, 500 streams at 50/s"),
    ("paced_1000", "cpu_us_per_token", "CPU µs a token, 1,000 streams at 50/s"),
    ("websocket_300", "cpu_us_per_token", "CPU µs a message, 300 WebSockets at 50/s"),
    ("paced_500", "gap_p99_ms", "gap between tokens at p99, ms, 500 streams"),
    ("paced_1000", "gap_p99_ms", "gap between tokens at p99, ms, 1,000 streams"),
    ("ttft", "ttft_p99_ms", "time to first token at p99, ms"),
    ("flood_16", "tokens_per_s", "tokens/s, 16 readers, as fast as it can"),
    ("flood_1000", "tokens_per_s", "tokens/s, 1,000 readers, as fast as it can"),
    ("idle_5000", "kib_each", "KiB for each of 5,000 idle streams"),
    ("idle_5000", "openings_per_s", "openings a second"),
)
OURS, THEIRS, BEHIND = "#1f6feb", "#b8c0cc", "#e5b8b8"


def draw(result: dict[str, Any], path: str) -> None:
    panels = [panel for panel in PANELS if panel[0] in result["loads"]]
    rows = -(-len(panels) // 2)
    figure, axes = plt.subplots(rows, 2, figsize=(9, 1.5 * rows), squeeze=False, layout="constrained")
    for axis, panel in zip(axes.flat, panels, strict=False):
        _panel(axis, result["loads"], *panel)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.suptitle(f"Median of {result['rounds']} rounds, {result['machine']}; pale red: the pace was not held")
    figure.savefig(path, metadata={"Date": None})


def _panel(axis: Any, loads: dict[str, Any], load: str, figure: str, title: str) -> None:
    measured = {name: figures for name, figures in loads[load].items() if figure in figures}
    names = sorted(measured, key=lambda name: (name != "tokenflow", name), reverse=True)  # ours on top
    colours = [
        BEHIND if not measured[name].get("held", 1) else OURS if name == "tokenflow" else THEIRS for name in names
    ]
    bars = axis.barh(names, [measured[name][figure] for name in names], color=colours)
    axis.bar_label(bars, labels=[f"{measured[name][figure]:,.4g}" for name in names], padding=2)
    axis.set_title(title, loc="left", fontsize=8)
    axis.margins(x=0.15)
    axis.xaxis.set_visible(False)
    axis.spines[["top", "right", "bottom"]].set_visible(False)


if __name__ == "__main__":
    draw(json.load(sys.stdin), sys.argv[1])
