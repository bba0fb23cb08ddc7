"""What the first rank that comes to a question decides for all: no rank waits for another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from ..torch_internals.groups import default_store
from .life import life, nobody_to_ask


def first_decides(mesh: DeviceMesh) -> Callable[[str, str], str]:
    """A function ``decide(question, answer)`` that returns, on every rank of ``mesh`` and whenever it is called, the
    answer of the first rank that came to the question.

    For what all ranks must do alike but may see otherwise: a schedule rests on predicted times, and so on the sizes of
    this rank's batch. Nobody waits for anybody, so a rank may compile again alone. Questions must be equal on ranks
    that need one answer, and be of one graph only: of no one model, because compiled code may serve several. With one
    rank, or the ``fake`` backend, there is nobody to ask but this rank itself: a checkpointed layer that is compiled
    again in the backward must save what it saved before.
    """
    if nobody_to_ask(mesh):
        return life().answers.setdefault
    store, prefix = default_store(), life().prefix(mesh)

    def decide(question: str, answer: str) -> str:
        return _first_posted(store, _key(prefix, question), answer)

    return decide


def _first_posted(store: Store, key: str, answer: str) -> str:
    """What was posted first under a key. A rank with the same answer, as nearly all have, sends and gets a digest."""
    digest = _digest(answer)
    if not store.check([key]):
        store.set(f"{key}/{digest}", answer)
    return _posted(store, key, store.compare_set(key, "", digest), answer)


def _posted(store: Store, key: str, held: bytes, answer: str) -> str:
    """What was posted under a key that holds this digest, if it is not ``answer``, which one has."""
    digest = held.decode()
    return answer if digest == _digest(answer) else store.get(f"{key}/{digest}").decode()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _key(prefix: str, question: str) -> str:
    """Under which the ranks of a mesh, whose keys have that prefix, post their decision."""
    return f"{prefix}/decided/{_digest(question)}"


class Trial:
    """One call of ``explain``, on all ranks of the meshes whose graphs it compiles.

    What was decided for graphs that run holds in it too, so it shows what they do. What it is first to decide holds in
    it alone.
    """

    def __init__(self) -> None:
        self._answers: dict[str, str] = {}
        self._prefixes: dict[DeviceMesh, str] = {}

    def first_decides(self, mesh: DeviceMesh) -> Callable[[str, str], str]:
        """As the function of that name, of whose decisions it makes none."""
        if nobody_to_ask(mesh):
            running = life().answers
            return lambda question, answer: self._answers.setdefault(question, running.get(question, answer))
        store, prefix, own = default_store(), life().prefix(mesh), self._prefix(mesh)

        def decide(question: str, answer: str) -> str:
            key = _key(prefix, question)
            held = _posted(store, key, store.get(key), answer) if store.check([key]) else answer
            # One rank may have found no decision where the next finds one: the first of them says what there was.
            return _first_posted(store, _key(own, question), held)

        return decide

    def _prefix(self, mesh: DeviceMesh) -> str:
        """Of the keys under which the ranks of a mesh post what they decide in this trial."""
        if mesh not in self._prefixes:
            self._prefixes[mesh] = life().next_exchange(mesh)
        return self._prefixes[mesh]
