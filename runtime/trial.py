"""Compilations of which nobody runs what comes out: what they decide binds no other."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.device_mesh import DeviceMesh

from ..torch_internals import default_store
from .agreement import decision_key, life, nobody_to_ask


class Trial:
    """One call of ``explain``, on all ranks of the meshes whose graphs it compiles.

    What was decided for graphs that run holds in it too, so it shows what they do. What it is first to decide holds in
    it alone.
    """

    def __init__(self) -> None:
        self._answers: dict[str, str] = {}
        self._prefixes: dict[DeviceMesh, str] = {}

    def first_decides(self, mesh: DeviceMesh) -> Callable[[str, str], str]:
        """As that of ``agreement``, which it writes nothing to."""
        if nobody_to_ask(mesh):
            running = life().answers
            return lambda question, answer: self._answers.setdefault(question, running.get(question, answer))
        store, prefix, own = default_store(), life().prefix(mesh), self._prefix(mesh)

        def decide(question: str, answer: str) -> str:
            key = decision_key(prefix, question)
            held = store.get(key).decode() if store.check([key]) else answer
            # One rank may have found no decision where the next finds one: the first of them says what there was.
            return store.compare_set(decision_key(own, question), "", held).decode()

        return decide

    def _prefix(self, mesh: DeviceMesh) -> str:
        """Of the keys under which the ranks of a mesh post what they decide in this trial."""
        if mesh not in self._prefixes:
            self._prefixes[mesh] = life().next_exchange(mesh)
        return self._prefixes[mesh]
