"""Proof, before anything runs, that all ranks are about to do the same collectives.

Ranks that disagree on the shape or order of their collectives hang, or exchange garbage. So each rank posts a
digest of what it is about to do in the default process group's store; the first of them compares, and its verdict
reaches all. O(world size) small messages in all, no collective, and every wait has a deadline. There is one verdict:
a rank that gives up waiting gives it for all, also for those that come later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import chain, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..torch_internals.groups import default_store, timeout_of
from .collectives import exchanges_directly
from .dbuffer import DBuffer
from .life import life, name_of, nobody_to_ask, ranks_of
from .messages import connect

DEADLINE_S = 300.0
_GRACE_S = 10.0  # for the first rank to say who is missing
_MOST_NAMED = 8  # ranks that a message describes one by one
_MODEL = "sharded model"
_VALUES = "values of replicas"
_GRAPH = "compiled graph"
_OUTSIDE = "outside compiled code"
_FAILED = "failed to compile: "
_SAME_MODEL = (
    "Every rank must build the same model, in the same order, with the same parameters frozen, and compile and call it "
    "alike (with the same options, in training or evaluation, inside no_sync or not)."
)
_OTHERWISE_BUSY = "If not, they are not doing what the other ranks do: compare what each rank calls before this point."
_STILL_LOADING = (
    "If they were still loading, say, give them longer: torch.distributed.init_process_group(timeout=...). "
    + _OTHERWISE_BUSY
)
_STILL_COMPILING = (
    "If they were still loading or compiling, give them longer: torch.compile(..., options={'deadline': seconds}). "
    + _OTHERWISE_BUSY
)
_WHY_LEFT = (
    "Dynamo stops compiling what it has compiled torch._dynamo.config.recompile_limit times (TORCH_LOGS=recompiles "
    "says why); or it could not trace this call, because of an exception or a branch that only this rank's batch leads "
    "to (TORCH_LOGS=graph_breaks); or only this rank called the model uncompiled."
)
_STILL_COMPILED = "If they run compiled code for this unit, this rank has left it: " + _WHY_LEFT
_SAME_GRAPH = (
    _SAME_MODEL + " Where the forward of one rank alone raises, its graphs are others, too: without torch.compile it "
    "says what it raises."
)
_SAME_VALUES = (
    "Replicas must begin with equal parameters, or they stay different: seed all ranks alike where the model is "
    "built, or load one checkpoint on all."
)


class RanksDisagree(RuntimeError):
    """Ranks hold different models or graphs. Raised on every rank, with one message."""


class RanksMissing(RuntimeError):
    """Some ranks did not come to the point that the others reached, within the deadline."""


@torch.compiler.disable
def agree_on_buffers(buffers: Sequence[DBuffer], *, deadline_s: float | None = None) -> None:
    """:func:`agree` on the layout of units, and of replicas on their values, once for each buffer, where first read,
    and connect, while all are here; for ``deadline_s`` in compiled code.

    Every rank comes to that point, whether it compiles a graph there or has one already.
    """
    fresh = [buffer for buffer in buffers if not buffer.agreed]
    absent = _STILL_LOADING if deadline_s is None else _STILL_COMPILING
    meshes = list(dict.fromkeys(buffer.mesh for buffer in fresh))
    for done, mesh in enumerate(meshes, 1):
        members = [buffer for buffer in fresh if buffer.mesh == mesh]
        params, layouts = zip(*(each.describe() for each in members), strict=True)
        lines = [*sorted(chain.from_iterable(params)), *chain.from_iterable(layouts)]  # the most telling first
        with _others_hear(meshes[done:], _MODEL):
            agree(mesh, _MODEL, lines, absent=absent, deadline_s=deadline_s)
            if any(buffer.replicas is not None for buffer in members):
                _agree_on_values(mesh, members, absent, deadline_s)
        for buffer in members:
            if exchanges_directly(buffer.shard.device, buffer.group):
                connect(buffer.group)
            buffer.agreed = True


def _agree_on_values(mesh: DeviceMesh, buffers: Sequence[DBuffer], absent: str, deadline_s: float | None) -> None:
    sums = [f"unit {each.name}: checksum of this shard {each.checksum()}" for each in buffers]
    names = mesh.mesh_dim_names or ()
    with _others_hear([mesh], _VALUES):
        agree(mesh[names[0]], _VALUES, sums, remedy=_SAME_VALUES, absent=absent, deadline_s=deadline_s)
    # The replicas of other shards may be equal, and would go on.
    agree(mesh, _VALUES, [f"{_VALUES}: equal"], remedy=_SAME_VALUES, absent=absent, deadline_s=deadline_s)


def agree_on_graph(buffers: Sequence[DBuffer], lines: Sequence[str], *, deadline_s: float) -> None:
    """:func:`agree` on a graph's options and the order, sizes and dtypes of its collectives, once for each sequence of
    them.

    A rank that compiles again by itself, for another batch size, say, has the collectives of the first time, and
    waits for nobody.
    """
    fresh = [mesh for mesh in _of_other_ranks(buffers) if (name_of(mesh), *lines) not in life().graphs]
    for done, mesh in enumerate(fresh, 1):
        with _others_hear(fresh[done:], _GRAPH):
            agree(mesh, _GRAPH, lines, remedy=_SAME_GRAPH, absent=_STILL_COMPILING, deadline_s=deadline_s)
        life().graphs.add((name_of(mesh), *lines))


def tell_of_failure(buffers: Sequence[DBuffer], error: BaseException) -> None:
    """Posts why this rank has no graph where the others will come to :func:`agree_on_graph`, and waits for nobody."""
    why = "".join(traceback.format_exception_only(error)).strip()
    _leave(_of_other_ranks(buffers), _GRAPH, f"rank {dist.get_rank()} {_FAILED}{why}")


def _of_other_ranks(buffers: Sequence[DBuffer]) -> list[DeviceMesh]:
    """Their meshes, one of each set of ranks, however it divides them."""
    return list({name_of(mesh): mesh for mesh in dict.fromkeys(buffer.mesh for buffer in buffers)}.values())


@contextlib.contextmanager
def _others_hear(meshes: Iterable[DeviceMesh], what: str) -> Iterator[None]:
    """Where the ranks of one mesh do not agree, those of others among ``meshes``, who have no part in that, do not wait
    for them in vain."""
    try:
        yield
    except (RanksDisagree, RanksMissing) as error:
        _leave(meshes, what, str(error).partition("] ")[2])  # all of them alike, without their ranks
        raise


def _leave(meshes: Iterable[DeviceMesh], what: str, problem: str) -> None:
    for mesh in meshes:
        if not nobody_to_ask(mesh):
            _Exchange(mesh, what, [problem], "", "", 0.0).leave()


@torch.compiler.disable
def agree_on_leaving_compiled_code(buffer: DBuffer) -> None:
    """:func:`agree` that a unit which compiled graphs gather is gathered without them, when that first happens.

    The two gather in different places in the backward: a rank alone in this would send others what they don't expect.
    """
    if buffer.deadline is not None and not buffer.left_compiled_code:
        lines = [f"unit {buffer.name}"]
        agree(buffer.mesh, _OUTSIDE, lines, absent=_STILL_COMPILED, deadline_s=buffer.deadline)
        buffer.left_compiled_code = True


def agree(
    mesh: DeviceMesh,
    what: str,
    lines: Sequence[str],
    *,
    remedy: str = _SAME_MODEL,
    absent: str = _STILL_LOADING,
    deadline_s: float | None = None,
) -> None:
    """Raises on every rank of ``mesh`` unless all of them call this with the same ``lines``.

    Args:
        mesh: whose ranks must agree, those of all its dimensions. With one rank, or the ``fake`` backend, there is
            nothing to check.
        what: names the object of the check in messages.
        lines: what must be equal. The first line that differs is quoted.
        remedy: ends the message of RanksDisagree.
        absent: ends the message of RanksMissing.
        deadline_s: how long to wait for the other ranks, seconds. None: as long as collectives of the mesh may take.

    Raises:
        RanksDisagree: naming the ranks that differ, and the first difference.
        RanksMissing: naming the ranks that did not arrive.
    """
    if nobody_to_ask(mesh):
        return
    if deadline_s is None:
        deadline_s = timeout_of(mesh.get_group(0), torch.device(mesh.device_type)).total_seconds()
    exchange = _Exchange(mesh, what, list(lines), remedy, absent, deadline_s)
    message = exchange.judge() if exchange.rank == exchange.ranks[0] else exchange.read_verdict()
    if message is not None:
        missing = message.startswith("no answer")
        raise (RanksMissing if missing else RanksDisagree)(f"[rank {dist.get_rank()}] {what}: {message}")


class _Exchange:
    def __init__(
        self, mesh: DeviceMesh, what: str, lines: list[str], remedy: str, absent: str, deadline_s: float
    ) -> None:
        self.store = default_store()
        self.ranks = ranks_of(mesh)
        self.rank = dist.get_rank()
        self.lines = [what, *lines]
        self.remedy = remedy
        self.absent = absent
        self.deadline = time.monotonic() + deadline_s
        self.deadline_s = deadline_s
        self.prefix = life().next_exchange(mesh)
        digest = hashlib.sha256("\n".join(self.lines).encode()).hexdigest()
        self._post(f"digest/{self.rank}", digest)

    def leave(self) -> None:
        """Posts all that the others may ask for, and goes without their answer."""
        self._post(f"lines/{self.rank}", json.dumps(self.lines))
        if self.rank == self.ranks[0]:
            compares = f"rank {self.rank}, which compares, has {self.lines[1]!r}"
            self._settle({"message": _failures([self.lines]) or compares})

    def judge(self) -> str | None:
        """On the first rank: compares, tells the others, and returns the message, None if all agree."""
        keys = [f"digest/{rank}" for rank in self.ranks]
        if not self._comes(keys):
            return self._give_up().get("message")
        digests = dict(zip(self.ranks, self.store.multi_get([f"{self.prefix}/{key}" for key in keys]), strict=True))
        ((common, _),) = Counter(digests.values()).most_common(1)  # of those as common, the first rank's
        differing = [rank for rank in self.ranks if digests[rank] != common]
        like = next(rank for rank in self.ranks if digests[rank] == common)
        asked = [like, *differing[:_MOST_NAMED]]
        verdict = self._settle({"asked": asked} if differing else {})
        if "asked" not in verdict:
            return verdict.get("message")
        if self.rank in asked:
            self._post(f"lines/{self.rank}", json.dumps(self.lines))
        message = self._explain(like, differing)
        self._post("message", message)
        return message

    def read_verdict(self) -> str | None:
        """On the other ranks: waits for the first rank's word, and answers what it asks."""
        raw = self._read("verdict", grace_s=_GRACE_S)
        verdict = json.loads(raw) if raw is not None else self._give_up()
        if "asked" not in verdict:
            return verdict.get("message")
        if self.rank in verdict["asked"]:
            self._post(f"lines/{self.rank}", json.dumps(self.lines))
        return self._read("message", grace_s=30.0) or "ranks differ, and the comparison did not arrive."

    def _give_up(self) -> dict[str, Any]:
        """Says for all who is missing, unless there is a verdict by now; returns what holds."""
        # One rank asks for each of the others: all of them would be too many for the store.
        asking = int(self.store.compare_set(f"{self.prefix}/asking", "", str(self.rank)).decode())
        if asking == self.rank:
            missing = self._missing(self.ranks)
        elif (raw := self._read("verdict", grace_s=2 * _GRACE_S)) is not None:
            return json.loads(raw)
        else:
            missing = [asking]
        came = "" if missing else "; all have come, and the first of them has not compared"
        message = f"no answer from {_some(missing or self.ranks[:1])} within {self.deadline_s:g} s{came}. "
        return self._settle({"message": message + self.absent})

    def _missing(self, ranks: list[int]) -> list[int]:
        """Those that have not come. The store is asked for many at once: of ten thousand ranks few are missing."""
        if self.store.check([f"{self.prefix}/digest/{rank}" for rank in ranks]):
            return []
        half = len(ranks) // 2
        return [*self._missing(ranks[:half]), *self._missing(ranks[half:])] if half else ranks

    def _settle(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """The verdict that holds: the first."""
        held = self.store.compare_set(f"{self.prefix}/verdict", "", json.dumps(verdict)).decode()
        self._post("verdict", held)  # some stores (TCPStore without libuv) wake who waits only where a value is set
        return json.loads(held)

    def _explain(self, like: int, differing: list[int]) -> str:
        reference = self._lines_of(like)
        seen = {rank: self._lines_of(rank) for rank in differing[:_MOST_NAMED]}
        if failures := _failures([reference, *seen.values()]):
            return failures
        parts, came_to = [], {reference[0]}
        for rank, lines in seen.items():
            came_to.add(lines[0])
            mine, theirs = _first_difference(lines, reference)
            parts.append(f"rank {rank} has {mine or 'nothing'!r} where rank {like} has {theirs or 'nothing'!r}")
        verb = "differs" if len(differing) == 1 else "differ"
        left = len(came_to) > 1 and _OUTSIDE in came_to
        remedy = f"A rank has left compiled code that others run: {_WHY_LEFT}" if left else self.remedy
        return f"{_some(differing)} {verb} from the others: {'; '.join(parts)}. {remedy}"

    def _lines_of(self, rank: int) -> list[str]:
        """What a rank compares; of one that does not answer, nothing."""
        return json.loads(self._read(f"lines/{rank}", grace_s=20.0) or '[""]')

    def _post(self, key: str, value: str) -> None:
        self.store.set(f"{self.prefix}/{key}", value)

    def _read(self, key: str, grace_s: float) -> str | None:
        """The value under ``key``, or None if nobody posts it before the deadline."""
        return self.store.get(f"{self.prefix}/{key}").decode() if self._comes([key], grace_s) else None

    def _comes(self, keys: list[str], grace_s: float = 0.0) -> bool:
        """Whether there are values under all keys before the deadline."""
        left = max(self.deadline + grace_s - time.monotonic(), 0.01)
        try:
            whole = timedelta(milliseconds=math.ceil(1000 * left))  # it drops what is less, and would give up early
            self.store.wait([f"{self.prefix}/{key}" for key in keys], whole)
        except RuntimeError:  # DistStoreError, or a plain RuntimeError from some stores
            if time.monotonic() < self.deadline + grace_s:
                raise
            return False
        return True


def _failures(posted: Iterable[Sequence[str]]) -> str:
    """What ranks say in place of what they compare: that they can't compile, or have heard so on another mesh; empty if
    none does."""
    said = (line.removeprefix(f"{_GRAPH}: ") for lines in posted for line in lines if _FAILED in line)
    return "; ".join(dict.fromkeys(said))


def _first_difference(lines: Sequence[str], others: Sequence[str]) -> tuple[str, str]:
    """The first lines that differ, which are what ranks came to, if that differs; else an empty one for what only one
    of the two has anything of, by the part before the colon."""
    if lines[0] != others[0]:
        return lines[0], others[0]
    differing = (pair for pair in zip_longest(lines, others, fillvalue="") if pair[0] != pair[1])
    line, other = next(differing, ("?", "?"))
    if line and not _has(others, line):
        return line, ""
    return ("", other) if other and not _has(lines, other) else (line, other)


def _has(lines: Sequence[str], line: str) -> bool:
    return any(each.partition(": ")[0] == line.partition(": ")[0] for each in lines)


def _some(ranks: list[int]) -> str:
    named = f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks[:_MOST_NAMED]))}"
    return named if len(ranks) <= _MOST_NAMED else f"{named} and {len(ranks) - _MOST_NAMED} more"
