"""The verifier: correct graphs pass, and each way of breaking one is caught and named."""

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from vescale_compile.cost import PRESETS
from vescale_compile.passes import PIPELINE, check_pipeline
from vescale_compile.passes.context import (
    ALL_GATHER,
    REDUCE_SCATTER,
    Buffer,
    Comm,
    CompileContext,
    GraphError,
    GraphUnit,
    Lowering,
    Part,
    Pass,
    Role,
    Stage,
    Use,
)
from vescale_compile.passes.verify import verify
from vescale_compile.runtime import crossing, leaving, ops
from vescale_compile.runtime.agreement import RanksDisagree, agree
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
            port=None,
            views=(ParamView(0, (WORLD * S,), True),),
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
        decide=lambda question, answer: answer,
        units=units,
        params={},
        reduced_units=reduced,
        carried=frozenset(carried),
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

    def call(self, target, *args, mark: object = None, **kwargs: bool) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = torch.empty(WORLD * S)
        if mark is not None:
            node.meta["vescale"] = mark
        return node

    def buffer(self, use: Use = Use.PARAMETERS, unit: int = 0, *, slot: bool = False, carried: bool = False) -> fx.Node:
        mark = Buffer(use, unit, carried)
        if slot:
            return self.call(aten.slice.Tensor, self.slot, 0, 0, WORLD * S, mark=mark)
        return self.call(aten.empty.memory_format, [WORLD * S], mark=mark)

    def launch_gather(self, buffer: fx.Node, source: fx.Node | None = None, **options: bool) -> None:
        unit = buffer.meta["vescale"].unit
        mark = Comm(ALL_GATHER, Role.LAUNCH, unit)
        self.call(ops.start_all_gather, source or self.shards[unit], buffer, unit, "0", mark=mark, **options)

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

    def reduce(self, buffer: fx.Node) -> fx.Node:
        unit = buffer.meta["vescale"].unit if "vescale" in buffer.meta else 0
        shard, scratch = self.buffer(Use.REDUCED, unit), self.buffer(Use.SCRATCH, unit)
        launch, wait = (Comm(REDUCE_SCATTER, role, unit) for role in (Role.LAUNCH, Role.WAIT))
        self.call(ops.start_reduce_scatter, buffer, shard, scratch, unit, "0", "", mark=launch)
        self.call(ops.wait_reduce_scatter, buffer, shard, scratch, unit, mark=wait)
        return shard

    def read(self, node: fx.Node) -> fx.Node:
        return self.call(aten.relu.default, node)

    def verify(self, outputs: list[fx.Node], context: CompileContext) -> None:
        self.graph.output(tuple(outputs))
        verify(fx.GraphModule({}, self.graph), context)


def test_a_correct_forward_passes_and_its_collectives_are_recorded():
    graph, forward = Graph(), context(Part.FORWARD)
    graph.verify([graph.read(graph.gather(graph.buffer()))], forward)
    assert forward.collectives == {Part.FORWARD: ["all_gather of unit 0: 4 elements of torch.float32"]}


def test_a_correct_backward_passes():
    graph = Graph()
    graph.verify(
        [graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS)))], context(Part.BACKWARD, reduced=(0,))
    )


def test_units_may_follow_one_another_in_a_slot():
    graph = Graph()
    outputs = [graph.read(graph.gather(graph.buffer(unit=unit, slot=True))) for unit in range(2)]
    graph.verify(outputs, context(Part.FORWARD))


def test_reading_a_gather_before_its_wait():
    graph = Graph()
    buffer = graph.buffer()
    graph.launch_gather(buffer)
    early = graph.read(buffer)
    graph.wait_gather(buffer)
    with pytest.raises(
        GraphError,
        match=r"\[rank 3\] the gathered parameters of unit layers\.0 are read before the wait of their.*relu",
    ):
        graph.verify([early], context(Part.FORWARD))


def test_reading_a_buffer_that_was_never_gathered():
    graph = Graph()
    with pytest.raises(GraphError, match=r"of unit layers\.0 are read before anything was written there"):
        graph.verify([graph.read(graph.buffer())], context(Part.FORWARD))


def test_a_gather_without_a_wait():
    graph = Graph()
    graph.launch_gather(graph.buffer())
    with pytest.raises(GraphError, match=r"the collective on the gathered parameters of unit layers\.0 has no wait"):
        graph.verify([graph.shards[0]], context(Part.FORWARD))


def test_a_gather_with_two_waits():
    graph = Graph()
    buffer = graph.gather(graph.buffer())
    graph.wait_gather(buffer)
    with pytest.raises(GraphError, match="a wait for no launch"):
        graph.verify([graph.read(buffer)], context(Part.FORWARD))


def test_a_unit_gathered_twice_in_one_graph():
    graph = Graph()
    both = [graph.read(graph.gather(graph.buffer())) for _ in range(2)]
    with pytest.raises(GraphError, match=r"forward: unit layers\.0 is gathered 2 times"):
        graph.verify(both, context(Part.FORWARD))


def test_gathering_something_computed_from_the_shard():
    graph = Graph()
    buffer = graph.buffer()
    graph.launch_gather(buffer, graph.call(aten.clone.default, graph.shards[0]))
    graph.wait_gather(buffer)
    with pytest.raises(GraphError, match="not the shard itself but was computed from it"):
        graph.verify([graph.read(buffer)], context(Part.FORWARD))


def test_writing_to_a_gathered_parameter_through_a_view():
    graph = Graph()
    view = graph.call(aten.view.default, graph.gather(graph.buffer()), [2, 4])
    written = graph.call(aten.mul_.Tensor, view, 2.0)
    with pytest.raises(GraphError, match=r"writes to the gathered parameters of unit layers\.0"):
        graph.verify([graph.read(written)], context(Part.FORWARD))


def test_a_slot_given_to_another_unit_while_its_parameters_are_still_read():
    graph = Graph()
    first = graph.gather(graph.buffer(unit=0, slot=True))
    view = graph.call(aten.view.default, first, [2, 4])
    second = graph.gather(graph.buffer(unit=1, slot=True))
    with pytest.raises(
        GraphError,
        match=r"reads the gathered parameters of unit layers\.0, whose memory holds the gathered parameters of unit "
        r"layers\.1",
    ):
        graph.verify([graph.read(view), graph.read(second)], context(Part.FORWARD))


def test_a_slot_given_to_another_unit_while_a_gather_is_in_flight_on_it():
    graph = Graph()
    first, second = (graph.buffer(unit=unit, slot=True) for unit in range(2))
    graph.launch_gather(first)
    graph.launch_gather(second)
    with pytest.raises(GraphError, match="get memory on which a collective is in flight"):
        graph.verify([graph.shards[0]], context(Part.FORWARD))


def test_a_gradient_written_into_a_slot_on_which_a_gather_is_in_flight():
    graph = Graph()
    graph.launch_gather(graph.buffer(unit=0, slot=True))
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS, 1, slot=True))
    with pytest.raises(GraphError, match="writes to memory on which a collective is in flight"):
        graph.verify([graph.reduce(gradients)], context(Part.BACKWARD, reduced=(1,)))


def test_keeping_the_gathered_parameters_of_a_unit_that_reshards():
    graph = Graph()
    view = graph.call(aten.view.default, graph.gather(graph.buffer()), [2, 4])
    with pytest.raises(GraphError, match=r"unit layers\.0 is resharded after forward, but its parameters are kept"):
        graph.verify([view], context(Part.FORWARD))


def test_keeping_them_is_right_where_the_unit_does_not_reshard():
    graph = Graph()
    view = graph.call(aten.view.default, graph.gather(graph.buffer()), [2, 4])
    graph.verify([view], context(Part.FORWARD, reshard=False))


def test_a_gather_may_be_in_flight_when_the_forward_ends_if_it_is_carried_over():
    graph = Graph()
    graph.cross(Role.CARRY, graph.buffer(slot=True, carried=True))
    graph.verify([graph.shards[0]], context(Part.FORWARD, carried=(0,)))


def test_what_is_carried_over_is_read_after_it_was_taken():
    graph = Graph()
    taken = graph.cross(Role.TAKE, graph.buffer(slot=True, carried=True))
    graph.verify([graph.read(taken)], context(Part.BACKWARD, carried=(0,)))


def test_reading_what_is_carried_over_before_it_was_taken():
    graph = Graph()
    buffer = graph.buffer(slot=True, carried=True)
    early = graph.read(buffer)
    graph.cross(Role.TAKE, buffer)
    with pytest.raises(GraphError, match=r"of unit layers\.0 are read before anything was written there"):
        graph.verify([early], context(Part.BACKWARD, carried=(0,)))


@pytest.mark.parametrize(("part", "role"), [(Part.FORWARD, Role.CARRY), (Part.BACKWARD, Role.TAKE)])
def test_a_slot_of_what_is_carried_over_holds_nothing_else(part, role):
    graph = Graph()
    read = graph.read(graph.gather(graph.buffer(unit=1, slot=True)))
    graph.cross(role, graph.buffer(slot=True, carried=True))
    with pytest.raises(GraphError, match="share a slot with what is carried to the backward"):
        graph.verify([read], context(part, carried=(0,)))


@pytest.mark.parametrize("part", [Part.FORWARD, Part.BACKWARD])
def test_a_gather_that_only_one_of_the_graphs_carries_over(part):
    graph = Graph()
    with pytest.raises(GraphError, match=rf"{part.value}: gathers of units \[\] cross, not \[0\]"):
        graph.verify([graph.shards[0]], context(part, carried=(0,)))


def test_carrying_over_into_memory_that_is_not_set_apart():
    graph = Graph()
    graph.cross(Role.CARRY, graph.buffer(slot=True))
    with pytest.raises(GraphError, match="are carried over to the backward by one graph only"):
        graph.verify([graph.shards[0]], context(Part.FORWARD, carried=(0,)))


def test_a_gradient_written_after_its_reduction_was_launched():
    graph = Graph()
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS))
    reduced = graph.reduce(gradients)
    graph.write_gradient(gradients)
    with pytest.raises(GraphError, match="whose reduction was launched before"):
        graph.verify([reduced], context(Part.BACKWARD, reduced=(0,)))


def test_a_gradient_packed_into_another_buffer_than_the_one_that_is_reduced():
    graph = Graph()
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS))
    reduced = graph.reduce(graph.call(aten.cat.default, [gradients]))
    with pytest.raises(GraphError, match="what is reduced is not the buffer that gradients are written to"):
        graph.verify([reduced], context(Part.BACKWARD, reduced=(0,)))


def test_a_reduced_gradient_copied_on_its_way_out():
    graph = Graph()
    reduced = graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS)))
    with pytest.raises(GraphError, match=r"reduced gradients of unit layers\.0 are moved or computed with"):
        graph.verify([graph.call(aten.clone.default, reduced)], context(Part.BACKWARD, reduced=(0,)))


@pytest.mark.parametrize("times", [0, 2])
def test_a_gradient_that_is_not_reduced_exactly_once(times):
    graph = Graph()
    reduced = [graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS))) for _ in range(times)]
    with pytest.raises(GraphError, match=rf"the gradient of unit layers\.0 is reduced {times} times, once is right"):
        graph.verify(reduced or [graph.shards[0]], context(Part.BACKWARD, reduced=(0,)))


def test_a_joint_graph_that_reduced_a_gradient_twice():
    graph = Graph()
    reduced = [graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS))) for _ in range(2)]
    with pytest.raises(GraphError, match="reduced 2 times"):
        graph.verify(reduced, context(Part.BACKWARD, reduced=(0, 0)))


@on_ranks(2)
def test_collectives_in_another_order_on_one_rank_are_found():
    lines = ["all_gather of unit 0", "all_gather of unit 1"]
    mine = lines if dist.get_rank() == 0 else lines[::-1]
    with pytest.raises(
        RanksDisagree, match="rank 1 has 'all_gather of unit 1' where rank 0 has 'all_gather of unit 0'"
    ):
        agree(init_device_mesh("cpu", (2,)), "graph", mine)


def test_a_pipeline_whose_pass_lacks_what_it_requires():
    needy = Pass(Stage.JOINT, verify, requires=frozenset({"a pass that is not there"}))
    with pytest.raises(ValueError, match=r"pass verify requires \['a pass that is not there'\]"):
        check_pipeline([*PIPELINE, needy])


def left_reduction(graph: Graph, gradients: fx.Node) -> fx.Node:
    """Launched, and left in flight; returns where the result will be."""
    shard, scratch = graph.buffer(Use.REDUCED), graph.buffer(Use.SCRATCH)
    launch, left = (Comm(REDUCE_SCATTER, role, 0) for role in (Role.LAUNCH, Role.LEAVE))
    graph.call(ops.start_reduce_scatter, gradients, shard, scratch, 0, "0", "", mark=launch)
    graph.call(leaving.leave_reduce_scatter, gradients, shard, scratch, 0, mark=left)
    return shard


def test_a_reduction_may_be_in_flight_when_the_backward_ends():
    graph = Graph()
    shard = left_reduction(graph, graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=True)))
    graph.verify([shard], context(Part.BACKWARD, reduced=(0,)))


def test_its_result_may_be_cast_when_it_is_read():
    graph = Graph()
    shard = left_reduction(graph, graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=True)))
    result = graph.buffer(Use.REDUCED)
    graph.call(leaving.cast_when_read, shard, result, 0)
    graph.verify([result], context(Part.BACKWARD, reduced=(0,)))


def test_casting_when_it_is_read_what_was_waited_for():
    graph = Graph()
    shard = graph.reduce(graph.write_gradient(graph.buffer(Use.GRADIENTS)))
    result = graph.buffer(Use.REDUCED)
    graph.call(leaving.cast_when_read, shard, result, 0)
    with pytest.raises(GraphError, match=r"of unit layers\.0 are read, which were not left in flight"):
        graph.verify([result], context(Part.BACKWARD, reduced=(0,)))


def test_computing_with_the_result_of_a_reduction_that_was_left_in_flight():
    graph = Graph()
    shard = left_reduction(graph, graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=True)))
    with pytest.raises(GraphError, match=r"reduced gradients of unit layers\.0 are read before the wait"):
        graph.verify([graph.read(shard)], context(Part.BACKWARD, reduced=(0,)))


def test_a_slot_given_away_though_a_reduction_was_left_in_flight_on_it():
    graph = Graph()
    shard = left_reduction(graph, graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=True)))
    gathered = graph.read(graph.gather(graph.buffer(unit=1, slot=True)))
    with pytest.raises(GraphError, match="get memory on which a collective is in flight"):
        graph.verify([shard, gathered], context(Part.BACKWARD, reduced=(0,)))


def test_gradients_written_though_a_reduction_was_left_in_flight_there():
    graph = Graph()
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=True))
    shard = left_reduction(graph, gradients)
    graph.write_gradient(gradients)
    with pytest.raises(GraphError, match="whose reduction was launched before"):
        graph.verify([shard], context(Part.BACKWARD, reduced=(0,)))


def test_launches_one_behind_the_other_may_share_a_collective():
    graph = Graph()
    first, second = (graph.buffer(unit=unit) for unit in range(2))
    graph.launch_gather(first, with_next=True)
    graph.launch_gather(second)
    for buffer in (first, second):
        graph.wait_gather(buffer)
    forward = context(Part.FORWARD)
    graph.verify([graph.read(first), graph.read(second)], forward)
    assert forward.collectives[Part.FORWARD][0].endswith(", with the next")


def test_sharing_a_collective_with_a_launch_of_another_kind():
    graph = Graph()
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS))
    gathered = graph.buffer(unit=1)
    graph.launch_gather(gathered, with_next=True)
    reduced = graph.reduce(gradients)
    graph.wait_gather(gathered)
    with pytest.raises(GraphError, match="shares a collective with the next launch, which is of another kind"):
        graph.verify([graph.read(gathered), reduced], context(Part.BACKWARD, reduced=(0,)))


def test_sharing_a_collective_with_a_launch_that_is_not_there():
    graph = Graph()
    buffer = graph.buffer()
    graph.launch_gather(buffer, with_next=True)
    graph.wait_gather(buffer)
    with pytest.raises(GraphError, match=r"shares a collective with the next launch, which is .* missing"):
        graph.verify([graph.read(buffer)], context(Part.FORWARD))


def test_leaving_a_reduction_in_flight_in_another_graph_than_the_backward():
    graph = Graph()
    shard = left_reduction(graph, graph.write_gradient(graph.buffer(Use.GRADIENTS)))
    with pytest.raises(GraphError, match="only a backward leaves reductions in flight"):
        graph.verify([shard], context(Part.FORWARD))
