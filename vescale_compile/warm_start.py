"""Warm starts: AOTAutograd's cache keeps what the passes found out together with the code that was generated.

What comes out of that cache was traced, rewritten and verified by the process that put it there. So each lowered graph
is kept with all that this compilation had found at its end: collectives, slots, schedules, predictions, and what ranks
had decided together. A process that finds it puts the same questions to the other ranks, and compiles anew where they
have decided otherwise.

Private names of PyTorch, tried on torch 2.11.0 to 2.13.0: nothing public stands between AOTAutograd and its cache.
"""

from __future__ import annotations

import functools
import glob
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.aot_autograd_result import BundledOutputCodeLoadable
from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch._inductor.output_code import CompiledFxGraph, OutputCode

from .passes.agreed import question
from .passes.context import CompileContext, Part
from .runtime.collectives import checked_for_nan
from .runtime.pool import SlotSpec
from .runtime.unshard import unshard
from .torch_internals.tracing import size_hint

Boxed = Callable[[list[Any]], Any]


class WarmStart:
    """One compilation's way into the cache and out of it.

    Args:
        context: of the compilation.
        add_slots: makes a boxed function of a graph of its own arguments, given one that takes slots too, and those.
        examination: which must be over before code is loaded; None where there is no need.
    """

    def __init__(
        self, context: CompileContext, add_slots: Callable[..., Boxed], examination: threading.Thread | None
    ) -> None:
        self.context = context
        self._add_slots = add_slots
        self._examination = examination
        self._found: Mapping[str, Any] | None = None
        self._began = time.monotonic()
        self.waited = 0.0  # of that for other ranks of this host, seconds

    def keep(self, lower: Callable[[], Boxed], part: Part) -> KeptGraph:
        """A graph that ``lower`` lowers, to be called, and to be put in the cache."""
        self._found = None  # where the cache had another part only
        self._await_examination()
        with _bundled(False):  # Inductor's cache is for the other ranks of this host, which lower the graph just now
            code = lower()
        return KeptGraph(code, part, self, None, self._add_slots(code, self.context.slots[part]))

    def resume(self, load: Callable[[], Boxed], part: Part, found: Mapping[str, Any]) -> Boxed:
        """A graph that the cache had and ``load`` loads, to be called.

        Raises:
            BypassAOTAutogradCache: the ranks have decided otherwise since; AOTAutograd then goes on without its cache.
        """
        if self._found is None:  # the first of the compilation's graphs; what was decided is of all
            self._ask_again(found["decisions"])
        self._found = found
        self._await_examination()
        return self._add_slots(load(), found["slots"][part])

    def found(self) -> Mapping[str, Any]:
        """What goes into the cache with each graph, at the end of the compilation."""
        self.context.seconds = self._took()
        return self.context.found()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Around AOTAutograd; after it the context holds what was found, be it by passes or in the cache."""
        token = _compiling.set(self)
        try:
            # Graphs lie in the cache's entry; otherwise it would refer to Inductor's cache, which has no room for more.
            with _bundled(True):
                yield
        finally:
            _compiling.reset(token)
        if self._found is not None:
            self.context.resume(self._found)
        else:
            self.context.seconds = self._took()

    def _took(self) -> float:
        return time.monotonic() - self._began - self.waited

    def _await_examination(self) -> None:
        """Two threads that examine a CPU at once get it wrong, and look for kernels under other flags."""
        if self._examination is not None:
            self._examination.join()

    def _ask_again(self, decisions: Mapping[str, str]) -> None:
        for asked, answer in decisions.items():
            if self.context.decide(asked, answer) != answer:
                raise BypassAOTAutogradCache("ranks have decided on another schedule than that of the kept graph")


def _bundled(bundled: bool) -> AbstractContextManager[None]:
    return torch._functorch.config.patch(bundled_autograd_cache=bundled)


_compiling: ContextVar[WarmStart] = ContextVar("compiling")


@dataclass
class KeptGraph(OutputCode):
    """A lowered graph, as AOTAutograd calls it and as its cache keeps it.

    Attributes:
        code: what Inductor made of the graph.
        part: which graph it is.
        compilation: that it belongs to; None in the cache.
        found: what the passes of that compilation had found at its end; None outside the cache.
        run: ``code`` with its slots; None in the cache.
    """

    code: Any
    part: Part
    compilation: WarmStart | None
    found: Mapping[str, Any] | None
    run: Boxed | None

    def __post_init__(self) -> None:
        self._boxed_call = True

    def __call__(self, inputs: Any) -> Any:
        assert self.run is not None
        return self.run(inputs)

    def prepare_for_serialization(self) -> None:
        """Called on a copy that will be pickled, when all graphs of the compilation have been lowered."""
        if not isinstance(self.code, CompiledFxGraph):
            raise BypassAOTAutogradCache("a graph without computation has no generated code to keep")
        assert self.compilation is not None
        kept = BundledOutputCodeLoadable(self.code)
        kept.pre_save()
        self.code, self.found = kept.result, self.compilation.found()
        if (bundle := self.code._triton_bundle) is not None:
            # Kernels that came out of Inductor's cache are the bundle's own, and can't be kept once they are loaded;
            # their machine code lies in the bundle too.
            unloaded = [each for each in bundle.static_autotuners if not each.kernel.launchers]
            self.code.set_triton_bundle(replace(bundle, static_autotuners=unloaded))
        self.compilation = self.run = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Called on what was pickled."""
        assert self.found is not None
        kept = BundledOutputCodeLoadable(self.code)
        load = functools.partial(kept.post_compile, kept.load(example_inputs), graph_kwargs)
        self.run = _compiling.get().resume(load, self.part, self.found)


def identify(gm: fx.GraphModule, context: CompileContext, inputs: Sequence[Any]) -> None:
    """Adds to a captured graph what its compilation rests on besides: the cache's key holds a graph's attributes.

    Sizes of this batch are part of it, also where the graph is dynamic in them: schedules rest on them. So are the
    names of units, which the report says, and which place the graph has in a step. Where NCCL looks for NaN, slots lie
    elsewhere.
    """
    sizes = [tuple(map(size_hint, each.shape)) if isinstance(each, torch.Tensor) else None for each in inputs]
    symbols = [size_hint(each) for each in inputs if isinstance(each, torch.SymInt)]
    beside = context.beside
    among = (beside.last, beside.followed, beside.standing) if context.memory_budget is None else beside
    names = [unit.name for unit in context.units]
    gm.__dict__["vescale_identity"] = question(
        repr((sources(), context.cluster, context.state_bytes, among, names, sizes, symbols, checked_for_nan())),
        context,
    )


def cacheable_functions() -> dict[str, str]:
    """What AOTAutograd may keep graphs with, by name: the user's, and the one call of ours in captured graphs.

    Each has a version, which is part of Inductor's key too. That of ours is in :func:`identify`.
    """
    ours = {f"{unshard.__module__}.{unshard.__qualname__}": ""}
    return torch._inductor.config.unsafe_marked_cacheable_functions | ours


def mark_version(gm: fx.GraphModule, slots: Sequence[SlotSpec]) -> str:
    """Has Inductor's cache key, which holds all that a graph's module has, differ from that of another version, and
    from that of slots in other places: code is in an order that goes by the memory that they have in common."""
    version = gm.__dict__["vescale_version"] = f"{sources()} {[*slots]}"
    return version


@functools.cache
def sources() -> str:
    """A digest of this package: what another version of it has made is not found."""
    files = glob.glob(f"{glob.escape(str(Path(__file__).parent))}/**/*.py", recursive=True)  # follows links to folders
    return get_hash_for_files(tuple(sorted(files))).hex()
