"""The verifier on gathers, slots and the order of collectives: each way of breaking a graph is caught and named."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from handmade import WORLD, Graph, aten, context
from ranks import on_ranks
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from vescale_compile.cost.collectives import ALL_GATHER
from vescale_compile.passes.context import Comm, GraphError, Part, Role, Use
from vescale_compile.runtime import ops
from vescale_compile.runtime.agreement import RanksDisagree, agree


def test_a_correct_forward_passes_and_its_collectives_are_recorded():
    graph, forward = Graph(), context(Part.FORWARD)
    graph.verify([graph.read(graph.gather(graph.buffer()))], forward)
    assert forward.collectives == {Part.FORWARD: ["all_gather of unit 0: 4 elements of torch.float32"]}


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
    with pytest.raises(GraphError, match=r"unit layers\.0 is gathered from clone_default, and its shard is shard_0"):
        graph.verify([graph.read(buffer)], context(Part.FORWARD))


def test_gathering_the_shard_of_another_unit():
    graph = Graph()
    buffer = graph.buffer()
    graph.launch_gather(buffer, graph.shards[1])
    graph.wait_gather(buffer)
    with pytest.raises(GraphError, match=r"unit layers\.0 is gathered from shard_1, and its shard is shard_0"):
        graph.verify([graph.read(buffer)], context(Part.FORWARD))


def test_gathering_into_the_buffer_of_another_unit():
    graph = Graph()
    buffer = graph.buffer(unit=1)
    graph.launch_gather(buffer, unit=0)
    with pytest.raises(GraphError, match=r"parameters of unit layers\.1 are in a collective of unit layers\.0"):
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


def test_a_slot_given_to_another_unit_while_a_collective_of_the_programs_sends_from_it():
    graph, c10d = Graph(), torch.ops._c10d_functional
    first = graph.gather(graph.buffer(unit=0, slot=True))
    sent = graph.call(c10d.all_gather_into_tensor.default, graph.call(aten.view.default, first, [2, 4]), WORLD, "1")
    second = graph.gather(graph.buffer(unit=1, slot=True))
    received = graph.call(c10d.wait_tensor.default, sent)
    with pytest.raises(GraphError, match=r"reads the gathered parameters of unit layers\.0, whose memory holds.*wait"):
        graph.verify([received, graph.read(second)], context(Part.FORWARD))


def test_a_slot_given_to_another_unit_when_a_collective_of_the_programs_has_sent_from_it():
    graph, c10d = Graph(), torch.ops._c10d_functional
    first = graph.gather(graph.buffer(unit=0, slot=True))
    sent = graph.call(c10d.all_gather_into_tensor.default, first, WORLD, "1")
    received = graph.call(c10d.wait_tensor.default, sent)
    second = graph.gather(graph.buffer(unit=1, slot=True))
    graph.verify([received, graph.read(second)], context(Part.FORWARD))


@pytest.fixture
def overlapping() -> tuple[Graph, list[fx.Node]]:
    """A graph with a slot for each of two units, of which the second begins in the middle of the first."""
    graph = Graph()
    return graph, [graph.buffer(unit=unit, slot=graph.slot_at(f"slot_{unit}", 16 * unit)) for unit in range(2)]


def test_units_may_follow_one_another_in_slots_that_have_memory_in_common(overlapping):
    graph, buffers = overlapping
    graph.verify([graph.read(graph.gather(buffer)) for buffer in buffers], context(Part.FORWARD))


@pytest.mark.parametrize("overwritten", [0, 1])
def test_parameters_that_are_read_when_a_part_of_their_memory_holds_others(overlapping, overwritten):
    graph, buffers = overlapping
    for buffer in (buffers[overwritten], buffers[1 - overwritten]):
        graph.gather(buffer)
    message = rf"layers\.{overwritten}, whose memory holds the gathered parameters of unit layers\.{1 - overwritten}"
    with pytest.raises(GraphError, match=message):
        graph.verify([graph.read(buffers[overwritten])], context(Part.FORWARD))


def test_a_gather_into_memory_of_which_a_part_is_in_flight(overlapping):
    graph, (first, second) = overlapping
    graph.launch_gather(first)
    graph.launch_gather(second)
    with pytest.raises(GraphError, match=r"unit layers\.1 get memory on which a collective is in flight"):
        graph.verify([graph.shards[0]], context(Part.FORWARD))


def test_gradients_that_are_written_to_memory_of_which_a_part_is_in_flight(overlapping):
    graph, (first, _) = overlapping
    graph.launch_gather(first)
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS, unit=1, slot=graph.slot_at("slot_2", 16)))
    with pytest.raises(GraphError, match=r"in flight: gathered parameters of unit layers\.0"):
        graph.verify([graph.reduce(gradients)], context(Part.BACKWARD, reduced=(1,)))


def test_a_gather_is_waited_for_though_another_was_beside_it_in_what_a_third_overwrites():
    """The third slot has memory of both the others, which have none in common."""
    graph = Graph()
    first, second, third = (graph.slot_at(f"slot_{at}", offset) for at, offset in enumerate((0, 32, 16)))
    graph.launch_gather(graph.buffer(unit=0, slot=first))
    graph.gather(graph.buffer(unit=1, slot=second))
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS, slot=third))
    with pytest.raises(GraphError, match=r"in flight: gathered parameters of unit layers\.0"):
        graph.verify([graph.reduce(gradients)], context(Part.BACKWARD, reduced=(0,)))


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


def test_a_gradient_of_which_a_part_was_overwritten_by_another_tenant_of_its_slot():
    graph = Graph()
    gradients = graph.write_gradient(graph.buffer(Use.GRADIENTS, 0, slot=True))
    parameters = graph.gather(graph.buffer(unit=1, slot=True))
    read = graph.read(parameters)
    graph.write_gradient(gradients)
    with pytest.raises(
        GraphError,
        match=r"writes more of the gradients of unit layers\.0, which the gathered parameters of unit layers\.1 "
        r"overwrote",
    ):
        graph.verify([graph.reduce(gradients), read], context(Part.BACKWARD, reduced=(0,)))


def test_keeping_the_gathered_parameters_of_a_unit_that_reshards():
    graph = Graph()
    view = graph.call(aten.view.default, graph.gather(graph.buffer()), [2, 4])
    with pytest.raises(GraphError, match=r"unit layers\.0 is resharded after forward, but its parameters are kept"):
        graph.verify([view], context(Part.FORWARD))


def test_keeping_them_is_right_where_the_unit_does_not_reshard():
    graph = Graph()
    view = graph.call(aten.view.default, graph.gather(graph.buffer()), [2, 4])
    graph.verify([view], context(Part.FORWARD, reshard=False))


@pytest.mark.parametrize(("part", "results"), [(Part.FORWARD, 1), (Part.INFERENCE, 0)])
def test_a_program_may_return_the_parameters_of_a_unit_that_reshards(part, results):
    graph = Graph()
    graph.verify([graph.gather(graph.buffer())], replace(context(part), results=results))


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


@pytest.mark.parametrize(
    ("part", "role", "first"),
    [(Part.FORWARD, Role.CARRY, False), (Part.BACKWARD, Role.TAKE, False), (Part.BACKWARD, Role.TAKE, True)],
)
def test_a_slot_of_what_is_carried_over_holds_nothing_else(part, role, first):
    graph = Graph()
    crossing = graph.buffer(slot=True, carried=True)
    if first:
        graph.cross(role, crossing)
    read = graph.read(graph.gather(graph.buffer(unit=1, slot=True)))
    if not first:
        graph.cross(role, crossing)
    with pytest.raises(GraphError, match="share a slot with what is carried to the backward"):
        graph.verify([read], context(part, carried=(0,)))


@pytest.mark.parametrize(("part", "role"), [(Part.FORWARD, Role.CARRY), (Part.BACKWARD, Role.TAKE)])
def test_a_gather_that_only_one_of_the_graphs_carries_over(part, role):
    graph = Graph()
    with pytest.raises(GraphError, match=rf"{part.value}: the gathers that cross are \[\], not \['{role.value} 0'\]"):
        graph.verify([graph.shards[0]], context(part, carried=(0,)))


def test_carrying_over_a_unit_twice():
    graph = Graph()
    for _ in range(2):
        graph.cross(Role.CARRY, graph.buffer(carried=True))
    with pytest.raises(GraphError, match=r"the gathers that cross are \['carry 0', 'carry 0'\], not \['carry 0'\]"):
        graph.verify([graph.shards[0]], context(Part.FORWARD, carried=(0,)))


@pytest.mark.parametrize("role", [Role.CARRY, Role.TAKE])
@pytest.mark.parametrize("part", Part)
def test_a_gather_that_crosses_though_none_was_to(part, role):
    graph = Graph()
    graph.cross(role, graph.buffer(carried=True))
    with pytest.raises(GraphError, match=rf"{part.value}: the gathers that cross are \['{role.value} 0'\], not \[\]"):
        graph.verify([graph.shards[0]], context(part))


def test_carrying_over_into_memory_that_is_not_set_apart():
    graph = Graph()
    graph.cross(Role.CARRY, graph.buffer(slot=True))
    with pytest.raises(GraphError, match="are carried over to the backward by one graph only"):
        graph.verify([graph.shards[0]], context(Part.FORWARD, carried=(0,)))


@on_ranks(2)
def test_collectives_in_another_order_on_one_rank_are_found():
    lines = ["all_gather of unit 0", "all_gather of unit 1"]
    mine = lines if dist.get_rank() == 0 else lines[::-1]
    with pytest.raises(
        RanksDisagree, match="rank 1 has 'all_gather of unit 1' where rank 0 has 'all_gather of unit 0'"
    ):
        agree(init_device_mesh("cpu", (2,)), "graph", mine)


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


def test_sharing_a_collective_with_a_launch_by_another_group():
    graph = Graph()
    first, second = (graph.buffer(unit=unit) for unit in range(2))
    graph.launch_gather(first, with_next=True)
    graph.launch_gather(second, group="1")
    with pytest.raises(GraphError, match="shares a collective with the next launch, which is of another kind"):
        graph.verify([], context(Part.FORWARD))


def test_sharing_a_collective_with_a_launch_of_another_dtype():
    graph = Graph()
    first, second = (graph.buffer(unit=unit) for unit in range(2))
    second.meta["val"] = second.meta["val"].bfloat16()
    graph.launch_gather(first, with_next=True)
    graph.launch_gather(second)
    with pytest.raises(GraphError, match="shares a collective with the next launch, which is of another kind"):
        graph.verify([], context(Part.FORWARD))


def test_sharing_a_collective_with_a_launch_that_is_not_there():
    graph = Graph()
    buffer = graph.buffer()
    graph.launch_gather(buffer, with_next=True)
    graph.wait_gather(buffer)
    with pytest.raises(GraphError, match=r"shares a collective with the next launch, which is .* missing"):
        graph.verify([graph.read(buffer)], context(Part.FORWARD))


def test_a_collective_of_the_ranks_of_another_unit():
    graph = Graph()
    buffer = graph.buffer()
    graph.launch_gather(buffer, group="1")
    graph.wait_gather(buffer)
    with pytest.raises(GraphError, match=r"marked as of unit layers\.0 is of group '1', not '0'"):
        graph.verify([graph.read(buffer)], context(Part.FORWARD))


def test_a_wait_that_names_another_unit_than_it_is_marked_as_of():
    graph = Graph()
    buffer = graph.buffer()
    graph.launch_gather(buffer)
    graph.call(ops.wait_all_gather, buffer, 1, mark=Comm(ALL_GATHER, Role.WAIT, 0))
    with pytest.raises(GraphError, match=r"marked as of unit layers\.0 is of unit 1, not 0"):
        graph.verify([graph.read(buffer)], context(Part.FORWARD))


def test_a_gather_of_less_than_a_unit():
    graph = Graph()
    buffer = graph.buffer()
    buffer.meta["val"] = buffer.meta["val"][1:]
    with pytest.raises(GraphError, match=r"gathered parameters of layers\.0 have 7 elements, and the unit has 8"):
        graph.verify([graph.read(graph.gather(buffer))], context(Part.FORWARD))


def test_a_result_in_a_slot():
    graph = Graph()
    kept = graph.gather(graph.buffer(slot=True))
    with pytest.raises(GraphError, match=r"gathered parameters of layers\.0 are returned from a slot"):
        graph.verify([graph.read(kept), kept], context(Part.FORWARD, reshard=False))
