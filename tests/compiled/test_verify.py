"""The verifier: correct graphs pass, and each way of breaking one is caught and named."""

import pytest
import torch
from ranks import on_ranks
from torch import fx

from vescale_compile.passes import PIPELINE, check_pipeline
from vescale_compile.passes.context import (
    ALL_GATHER,
    REDUCE_SCATTER,
    Comm,
    CompileContext,
    GraphError,
    GraphUnit,
    Part,
    Pass,
    Role,
    Stage,
)
from vescale_compile.passes.verify import verify
from vescale_compile.runtime.agreement import RanksDisagree, agree
from vescale_compile.runtime.unshard import CommSpec, ParamView

S, WORLD = 4, 2
functional, aten = torch.ops._c10d_functional, torch.ops.aten


def context(part: Part, *, reduced: tuple[int, ...] = (), reshard: bool = True) -> CompileContext:
    unit = GraphUnit(
        name="layers.0",
        shard=torch.empty(S),
        port=None,
        views=(ParamView(0, (WORLD * S,), True),),
        comm=CommSpec(0, WORLD, "0", torch.float32, torch.float32),
        reshard_after_forward=reshard,
    )
    return CompileContext(rank=3, units=(unit,), params={}, reduced_units=reduced, part=part)


class Graph:
    """A graph under construction, each node with an example value."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.shard = self.placeholder("shard", S)

    def placeholder(self, name: str, numel: int) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(numel)
        return node

    def call(self, target, *args, comm: Comm | None = None) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.empty(WORLD * S)
        if comm is not None:
            node.meta["vescale"] = comm
        return node

    def launch(self, kind: str, source: fx.Node) -> fx.Node:
        if kind == ALL_GATHER:
            return self.call(
                functional.all_gather_into_tensor.default, source, WORLD, "0", comm=Comm(kind, Role.LAUNCH, 0)
            )
        return self.call(
            functional.reduce_scatter_tensor.default,
            source,
            "avg",
            WORLD,
            "0",
            comm=Comm(kind, Role.LAUNCH, 0),
        )

    def wait(self, launch: fx.Node) -> fx.Node:
        comm = launch.meta["vescale"]
        return self.call(functional.wait_tensor.default, launch, comm=Comm(comm.kind, Role.WAIT, comm.unit))

    def collective(self, kind: str, source: fx.Node) -> fx.Node:
        return self.wait(self.launch(kind, source))

    def verify(self, outputs: list[fx.Node], context: CompileContext) -> None:
        self.graph.output(tuple(outputs))
        verify(fx.GraphModule({}, self.graph), context)


def test_a_correct_forward_passes_and_its_collectives_are_recorded():
    graph, forward = Graph(), context(Part.FORWARD)
    graph.verify([graph.call(aten.relu.default, graph.collective(ALL_GATHER, graph.shard))], forward)
    assert forward.collectives == {Part.FORWARD: ["all_gather of unit 0: 8 elements of torch.float32"]}


def test_a_correct_backward_passes():
    graph, grad = Graph(), None
    grad = graph.placeholder("grad", WORLD * S)
    graph.verify([graph.collective(REDUCE_SCATTER, grad)], context(Part.BACKWARD, reduced=(0,)))


def test_reading_a_gather_before_its_wait():
    graph = Graph()
    launch = graph.launch(ALL_GATHER, graph.shard)
    early = graph.call(aten.relu.default, launch)
    graph.wait(launch)
    with pytest.raises(GraphError, match=r"\[rank 3\] a collective's result is read before its wait.*relu"):
        graph.verify([early], context(Part.FORWARD))


def test_a_gather_without_a_wait():
    graph = Graph()
    graph.launch(ALL_GATHER, graph.shard)
    with pytest.raises(GraphError, match=r"all_gather of unit layers\.0 has 0 waits"):
        graph.verify([graph.shard], context(Part.FORWARD))


def test_a_gather_with_two_waits():
    graph = Graph()
    launch = graph.launch(ALL_GATHER, graph.shard)
    waits = [graph.call(aten.relu.default, graph.wait(launch)) for _ in range(2)]
    with pytest.raises(GraphError, match="has 2 waits"):
        graph.verify(waits, context(Part.FORWARD))


def test_a_unit_gathered_twice_in_one_graph():
    graph = Graph()
    both = [graph.call(aten.relu.default, graph.collective(ALL_GATHER, graph.shard)) for _ in range(2)]
    with pytest.raises(GraphError, match=r"forward: unit layers\.0 is gathered 2 times"):
        graph.verify(both, context(Part.FORWARD))


def test_writing_to_a_gathered_parameter_through_a_view():
    graph = Graph()
    view = graph.call(aten.view.default, graph.collective(ALL_GATHER, graph.shard), [2, 4])
    written = graph.call(aten.mul_.Tensor, view, 2.0)
    with pytest.raises(GraphError, match=r"writes to the gathered parameters of unit layers\.0"):
        graph.verify([graph.call(aten.relu.default, written)], context(Part.FORWARD))


def test_keeping_the_gathered_parameters_of_a_unit_that_reshards():
    graph = Graph()
    view = graph.call(aten.view.default, graph.collective(ALL_GATHER, graph.shard), [2, 4])
    with pytest.raises(GraphError, match=r"unit layers\.0 is resharded after forward, but its parameters are kept"):
        graph.verify([view], context(Part.FORWARD))


def test_keeping_them_is_right_where_the_unit_does_not_reshard():
    graph = Graph()
    view = graph.call(aten.view.default, graph.collective(ALL_GATHER, graph.shard), [2, 4])
    graph.verify([view], context(Part.FORWARD, reshard=False))


def test_a_gradient_written_after_its_reduction_was_launched():
    graph = Graph()
    grad = graph.placeholder("grad", WORLD * S)
    launch = graph.launch(REDUCE_SCATTER, grad)
    graph.call(aten.add_.Tensor, graph.call(aten.view.default, grad, [2, 4]), 1.0)
    with pytest.raises(GraphError, match="whose reduction was launched before"):
        graph.verify([graph.wait(launch)], context(Part.BACKWARD, reduced=(0,)))


@pytest.mark.parametrize("times", [0, 2])
def test_a_gradient_that_is_not_reduced_exactly_once(times):
    graph = Graph()
    grad = graph.placeholder("grad", WORLD * S)
    reduced = [graph.collective(REDUCE_SCATTER, grad) for _ in range(times)]
    with pytest.raises(GraphError, match=rf"the gradient of unit layers\.0 is reduced {times} times, once is right"):
        graph.verify(reduced or [grad], context(Part.BACKWARD, reduced=(0,)))


def test_a_joint_graph_that_reduced_a_gradient_twice():
    graph = Graph()
    grad = graph.placeholder("grad", WORLD * S)
    reduced = [graph.collective(REDUCE_SCATTER, grad) for _ in range(2)]
    with pytest.raises(GraphError, match="reduced 2 times"):
        graph.verify(reduced, context(Part.BACKWARD, reduced=(0, 0)))


@on_ranks(2)
def test_collectives_in_another_order_on_one_rank_are_found():
    import torch.distributed as dist

    lines = ["all_gather of unit 0", "all_gather of unit 1"]
    mine = lines if dist.get_rank() == 0 else lines[::-1]
    with pytest.raises(
        RanksDisagree, match="rank 1 has 'all_gather of unit 1' where rank 0 has 'all_gather of unit 0'"
    ):
        agree(dist.group.WORLD, "graph", mine)


def test_a_pipeline_whose_pass_lacks_what_it_requires():
    needy = Pass(Stage.JOINT, verify, requires=frozenset({"slots"}))
    with pytest.raises(ValueError, match=r"pass verify requires \['slots'\]"):
        check_pipeline([*PIPELINE, needy])
