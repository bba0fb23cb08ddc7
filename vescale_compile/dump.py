"""``VESCALE_DUMP=directory``: every graph before and after each pass, as text, by rank and compilation."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from pathlib import Path

from torch import fx

from .passes.context import comm_of
from .torch_internals.tracing import show_graph, shows_graphs

VARIABLE = "VESCALE_DUMP"
_compilations = itertools.count()


class GraphDump:
    """Writes the graphs of one compilation to ``directory/rank<r>/compile<n>/<i>-<stage>-<pass>.py``, and removes there
    what an earlier process has written.

    Without the variable it writes nothing; depyf, where it is active, gets the graphs in either case, and
    ``on_final`` the ones that have been through all passes.
    """

    def __init__(self, rank: int, on_final: Callable[[fx.Graph], None] | None = None) -> None:
        root = os.environ.get(VARIABLE)
        self._folder = Path(root) / f"rank{rank}" / f"compile{next(_compilations)}" if root else None
        self._ordinals = itertools.count()
        self._on_final = on_final

    @property
    def active(self) -> bool:
        """Whether anybody wants to see the graphs."""
        return self._folder is not None or self._on_final is not None or shows_graphs()

    def write(self, name: str, gm: fx.GraphModule, *, stage: str) -> None:
        show_graph(f"vescale {stage} {name}", gm)
        if self._folder is None:
            return
        _forget_earlier_runs(self._folder.parent)
        self._folder.mkdir(parents=True, exist_ok=True)
        words = [f"{next(self._ordinals):02d}", stage, *name.split()]
        text = gm.print_readable(print_output=False, include_stride=False, include_device=False)
        (self._folder / f"{'-'.join(words)}.py").write_text(f"{_summary(gm)}{text}\n")

    def show_final(self, graph: fx.Graph) -> None:
        if self._on_final is not None:
            self._on_final(graph)


@functools.cache
def _forget_earlier_runs(folder: Path) -> None:
    """Removes, once in a process, the graphs of those that wrote to a rank's folder before."""
    for graph in folder.glob("compile*/*.py"):
        graph.unlink()


def _summary(gm: fx.GraphModule) -> str:
    """A heading: how many nodes, and the collectives in order."""
    lines = [f"# {len(gm.graph.nodes)} nodes"]
    for node in gm.graph.nodes:
        if comm := comm_of(node):
            lines.append(f"# {comm.role.value:6} {comm.kind} of unit {comm.unit}: {node.name}")
    return "\n".join(lines) + "\n"
