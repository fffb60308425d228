"""What `tokenflow lab` found, as values: its files, and its bounds. Pure."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

TOKENS = 64
"""Of each generation that is read to its end."""
ASKED, TAKEN = 100, 5
"""Of the one that is left: asked for, and read."""
TOKENS_IN_ALL = 3 * TOKENS + TAKEN
TTFT_MS_BELOW = 3000
GAPS_AT_LEAST = 19
GENERATED_AT_MOST = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One stream as its reader saw it, in seconds from the request."""

    text: str
    arrivals_s: tuple[float, ...]
    """Of each token."""
    total_s: float

    @property
    def ttft_ms(self) -> float:
        return 1000 * self.arrivals_s[0]

    @property
    def gaps_ms(self) -> list[float]:
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return [1000 * (later - earlier) for earlier, later in pairs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Everything that was measured."""

    prompt: str
    texts: tuple[str, str]
    """Of two requests that were alike."""
    expected: str | None
    """What the engine's own function says; None where it is not installed."""
    timed: Timed
    generated: int
    """Tokens made for the reader that left."""

    def files(self) -> dict[str, str]:
        """The results, by file name."""
        gaps = self.timed.gaps_ms
        p50, p99 = percentile(gaps, 50), percentile(gaps, 99)
        tokens, ttft_ms = len(self.timed.arrivals_s), max(1, round(self.timed.ttft_ms))
        report = [
            f"ttft_ms={ttft_ms}",
            f"itl_p50_ms={p50:.2f}",
            f"tokens={tokens}",
            f"throughput_tps={tokens / self.timed.total_s:.2f}",
        ]
        return {
            "gen1.txt": self.texts[0],
            "gen2.txt": self.texts[1],
            "ttft.txt": f"ttft_ms={ttft_ms}\n",
            "itl.txt": f"count={len(gaps)} p50_ms={p50:.2f} p99_ms={p99:.2f}\n",
            "cancel.txt": f"requested={ASKED} generated={self.generated}\n",
            "report.txt": "\n".join(report) + "\n",
        }

    def summary(self) -> str:
        """The figures in one line."""
        files = self.files()
        return " ".join(files["report.txt"].split()) + f" cancelled: {files['cancel.txt'].strip()}"

    def problems(self) -> list[str]:
        """What is out of bounds, a line each."""
        first, second = self.texts
        gaps, ttft_ms = self.timed.gaps_ms, self.timed.ttft_ms
        checks = [
            (first == second, "the same prompt gave two different texts (gen1.txt, gen2.txt)"),
            (self.expected in (None, first), "the text is not what the synthetic engine's generate() says (gen1.txt)"),
            (self.timed.text == first, "the streamed text is not the one that comes whole (gen1.txt)"),
            (0 < ttft_ms < TTFT_MS_BELOW, f"{ttft_ms:.0f} ms to the first token; the bound is {TTFT_MS_BELOW}"),
            (len(gaps) >= GAPS_AT_LEAST, f"only {len(gaps)} gaps between tokens; at least {GAPS_AT_LEAST} are needed"),
            (
                TAKEN <= self.generated <= GENERATED_AT_MOST,
                f"{self.generated} tokens made for a reader that left after {TAKEN}; at most {GENERATED_AT_MOST}",
            ),
        ]
        return [words for good, words in checks if not good]


def percentile(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile; 0.0 of nothing."""
    if not values:
        return 0.0
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def expected_text(prompt: str, tokens: int) -> str | None:
    """What the synthetic engine's own function says; None where the plugin is not installed."""
    try:
        words = importlib.import_module("tokenflow_synthetic")
    except ImportError:
        return None
    return str(words.generate(prompt, tokens))
