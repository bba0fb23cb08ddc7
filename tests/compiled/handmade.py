"""Graphs written by hand, as the passes leave them, right and wrong, for the verifier."""

import torch
from torch import fx

from vescale_compile.cost import PRESETS
from vescale_compile.cost.collectives import ALL_GATHER, REDUCE_SCATTER
from vescale_compile.passes.context import (
    Buffer,
    Comm,
    CompileContext,
    GraphUnit,
    Lowering,
    Part,
    Role,
    Use,
)
from vescale_compile.passes.slot_memory import note_place
from vescale_compile.passes.verify import verify
from vescale_compile.runtime import crossing, leaving, ops
from vescale_compile.runtime.model import Beside
from vescale_compile.runtime.pool import SlotSpec
from vescale_compile.runtime.unshard import CommSpec, ParamView

S, WORLD = 4, 2
aten = torch.ops.aten


def context(
    part: Part, *, reduced: tuple[int, ...] = (), reshard: bool = True, carried: tuple[int, ...] = ()
) -> CompileContext:
    units = tuple(
        GraphUnit(
            name=f"layers.{ordinal}",
            shard=torch.empty(S),
            views=(ParamView(0, (WORLD * S,), True),),
            others=(),
            comm=CommSpec(ordinal, WORLD, "0", "", torch.float32, torch.float32, S),
            reshard_after_forward=reshard,
        )
        for ordinal in range(2)
    )
    return CompileContext(
        rank=3,
        lowering=Lowering.EAGER,
        cluster=PRESETS["h100"](WORLD),
        wanted_cluster="",
        memory_budget=None,
        wanted_budget="None",
        state_bytes=0,
        float32_products=False,
        beside=Beside(),
        decide=lambda question, answer: answer,
        units=units,
        params={},
        reduced_units=reduced,
        gradients=dict.fromkeys(reduced, frozenset([0])),
        carried=frozenset(carried),
        sources={0: "shard_0", 1: "shard_1"},
        part=part,
    )


class Graph:
    """A graph under construction, each node with an example value."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.shards = [self.placeholder(f"shard_{unit}", S) for unit in range(2)]
        self.slot = self.placeholder("slot", WORLD * S)

    def placeholder(self, name: str, numel: int) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(numel)
        return node

    def slot_at(self, name: str, offset: int) -> fx.Node:
        """A slot for a unit's parameters or gradients, bytes from the beginning of memory that others are places in."""
        slot = self.placeholder(name, WORLD * S)
        note_place(slot, SlotSpec(WORLD * S, torch.float32, torch.device("cpu"), offset=offset))
        return slot

    def call(self, target, *args, mark: object = None, **kwargs: object) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = torch.empty(WORLD * S)
        if mark is not None:
            node.meta["vescale"] = mark
        return node

    def buffer(
        self, use: Use = Use.PARAMETERS, unit: int = 0, *, slot: bool | fx.Node = False, carried: bool = False
    ) -> fx.Node:
        mark = Buffer(use, unit, "0" if carried else "")
        if slot:
            memory = self.slot if slot is True else slot
            return self.call(aten.slice.Tensor, memory, 0, 0, WORLD * S, mark=mark)
        return self.call(aten.empty.memory_format, [WORLD * S], mark=mark)

    def launch_gather(
        self,
        buffer: fx.Node,
        source: fx.Node | None = None,
        unit: int | None = None,
        group: str = "0",
        **options: bool,
    ) -> None:
        unit = buffer.meta["vescale"].unit if unit is None else unit
        mark = Comm(ALL_GATHER, Role.LAUNCH, unit)
        self.call(ops.start_all_gather, source or self.shards[unit], buffer, unit, group, mark=mark, **options)

    def wait_gather(self, buffer: fx.Node) -> None:
        unit = buffer.meta["vescale"].unit
        self.call(ops.wait_all_gather, buffer, unit, mark=Comm(ALL_GATHER, Role.WAIT, unit))

    def gather(self, buffer: fx.Node) -> fx.Node:
        self.launch_gather(buffer)
        self.wait_gather(buffer)
        return buffer

    def cross(self, role: Role, buffer: fx.Node) -> fx.Node:
        unit = buffer.meta["vescale"].unit
        target = crossing.carry_all_gather if role is Role.CARRY else crossing.take_all_gather
        self.call(target, self.shards[unit], buffer, unit, "0", mark=Comm(ALL_GATHER, role, unit))
        return buffer

    def write_gradient(self, buffer: fx.Node) -> fx.Node:
        self.call(aten.fill_.Scalar, buffer, 1)
        return buffer

    def launch_reduction_of(
        self, gradients: fx.Node, unit: int | None = None, replicas: str = "", **options: bool
    ) -> list[fx.Node]:
        """Returns the gradients, where the result will be, and scratch."""
        if unit is None:
            unit = gradients.meta["vescale"].unit if "vescale" in gradients.meta else 0
        buffers = [gradients, self.buffer(Use.REDUCED, unit), self.buffer(Use.SCRATCH, unit)]
        mark = Comm(REDUCE_SCATTER, Role.LAUNCH, unit)
        self.call(ops.start_reduce_scatter, *buffers, unit, "0", replicas, mark=mark, **options)
        return buffers

    def wait_reduction_of(self, buffers: list[fx.Node]) -> fx.Node:
        unit = buffers[1].meta["vescale"].unit
        self.call(ops.wait_reduce_scatter, *buffers, unit, mark=Comm(REDUCE_SCATTER, Role.WAIT, unit))
        return buffers[1]

    def reduce(self, gradients: fx.Node, unit: int | None = None) -> fx.Node:
        return self.wait_reduction_of(self.launch_reduction_of(gradients, unit))

    def leave_reduction(self, gradients: fx.Node) -> fx.Node:
        """Launched, and left in flight; returns where the result will be."""
        buffers = self.launch_reduction_of(gradients)
        self.call(leaving.leave_reduce_scatter, *buffers, 0, mark=Comm(REDUCE_SCATTER, Role.LEAVE, 0))
        return buffers[1]

    def read(self, node: fx.Node) -> fx.Node:
        return self.call(aten.relu.default, node)

    def verify(self, outputs: list[fx.Node], context: CompileContext) -> None:
        self.graph.output(tuple(outputs))
        verify(fx.GraphModule({}, self.graph), context)
