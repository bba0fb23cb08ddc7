"""One line that tells how a run is going: redrawn on a terminal, a new line each time elsewhere."""

import sys
import time

BAR_WIDTH = 24


class Progress:
    """Prints the state of a loop of `total` steps to standard output."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.redraw = sys.stdout.isatty()
        self.started = time.monotonic()

    def show(self, step: int, state: str) -> None:
        filled = BAR_WIDTH * step // self.total
        elapsed = time.monotonic() - self.started
        bar = "█" * filled + "·" * (BAR_WIDTH - filled)
        line = f"{bar} {step:>{len(str(self.total))}}/{self.total} {elapsed:5.0f} s  {state}"
        print(f"\r\x1b[K{line}" if self.redraw else line, end="" if self.redraw else "\n", flush=True)

    def close(self) -> None:
        if self.redraw:
            print(flush=True)
