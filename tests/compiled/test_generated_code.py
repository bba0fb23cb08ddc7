"""Generated code keeps the order that was scheduled: of launches, of waits, and of what is computed between them."""

import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from unittest import mock

import models
import pytest
import torch
from ranks import fake_world
from torch import fx, nn
from written import code_written_for

import vescale_compile as vc
from vescale_compile.backend import vescale
from vescale_compile.examples.llama import Llama, LlamaConfig
from vescale_compile.passes.aliases import allocations_of
from vescale_compile.passes.context import Comm, CompileContext, Part, Role, comm_of
from vescale_compile.schedule import Launch, Run, Schedule, TaskGraph

pytestmark = pytest.mark.slow  # left out of `make test-fast`

overlap = importlib.import_module("vescale_compile.passes.overlap")  # which the pass of that name hides

COLLECTIVES = r"(start|wait|carry|take|leave)_(all_gather|reduce_scatter)"
PRODUCTS = "mm|bmm|addmm|matmul_into"
# Taking what the forward launched, and leaving what the optimizer will wait for, are waits to the scheduler.
VERBS = {Role.LAUNCH: "launch", Role.WAIT: "wait", Role.TAKE: "wait", Role.LEAVE: "wait"}


class Call(NamedTuple):
    """A collective's launch or wait, or a product: its operator, and which of the graph's inputs it touches."""

    operator: str
    inputs: tuple[str, ...]


@dataclass(frozen=True)
class Lowered:
    """The forward or the backward of a step.

    Attributes:
        part: which of them.
        context, tasks, schedule: of its compilation.
        nodes: of the final graph, in order: names, and what collectives' nodes are.
        calls: of the final graph, in order.
        code: what Inductor wrote.
    """

    part: Part
    context: CompileContext
    tasks: TaskGraph
    schedule: Schedule
    nodes: list[str | Comm]
    calls: list[Call]
    code: str

    @property
    def calls_in_code(self) -> list[Call]:
        pattern = rf"^ +(?:buf\d+ = )?[\w.]+\.({COLLECTIVES}|{PRODUCTS})(?:\.default)?\((.*)\)$"
        inputs = {name for call in self.calls for name in call.inputs}
        return [
            Call(operator, tuple(sorted(inputs & {*re.findall(r"\w+", arguments)})))
            for operator, *_, arguments in re.findall(pattern, self.code, re.MULTILINE)
        ]

    @property
    def schedule_in_code(self) -> tuple[str, ...]:
        pattern = rf"vescale\.{COLLECTIVES}\.default\(.*?, (\d+)(?:, '\w*')*(, with_next=True)?\)$"
        return tuple(
            f"{role.replace('start', 'launch')} {kind} of {self.context.units[int(unit)].name}"
            + ", with the next" * bool(shared)
            for role, kind, unit, shared in re.findall(pattern, self.code, re.MULTILINE)
        )

    @property
    def planned(self) -> list[str]:
        """The schedule, without launches of what the forward has launched."""
        taken = {self._name(node) for node in self.nodes if isinstance(node, Comm) and node.role is Role.TAKE}
        found = []
        for instruction in self.schedule.instructions:
            if isinstance(instruction, Run):
                found.append(f"run {self.tasks.compute[instruction.position].name}")
                continue
            names = [self.tasks.transfers[index].name for index in instruction.transfers]
            if isinstance(instruction, Launch):
                found += [f"launch {name}" for name in names if name not in taken]
            else:
                found += [f"wait {name}" for name in names]
        return found

    @property
    def placed(self) -> list[str]:
        """What the final graph makes of the schedule; a task is named after its first node."""
        tasks = {task.name for task in self.tasks.compute}
        found = []
        for node in self.nodes:
            if not isinstance(node, Comm):
                found += [f"run {node}"] if node in tasks else []
            elif node.role in VERBS:
                found.append(f"{VERBS[node.role]} {self._name(node)}")
        return found

    def _name(self, comm: Comm) -> str:
        return f"{comm.kind} of {self.context.units[comm.unit].name}"


def five_layers() -> nn.Module:
    return Llama(LlamaConfig(layers=5, dim=32, heads=2, kv_heads=1))


def calls_of(graph: fx.Graph) -> list[Call]:
    places = allocations_of(graph)
    calls = []
    for node in graph.nodes:
        if re.fullmatch(f"{COLLECTIVES}|{PRODUCTS}", operator_of(node)):
            touched = {places[arg] for arg in node.all_input_nodes}
            inputs = sorted(place.name for place in touched if place.op == "placeholder")
            calls.append(Call(operator_of(node), tuple(inputs)))
    return calls


def operator_of(node: fx.Node) -> str:
    return node.target._opname if isinstance(node.target, torch._ops.OpOverload) else ""


@functools.cache
def lowered(build: models.Model, vocab: int, shape: tuple[int, int], slow_wire: bool) -> list[Lowered]:
    """A step of one rank of two, forward and backward."""
    torch._dynamo.reset()
    final: list[tuple[list[str | Comm], list[Call]]] = []

    def on_graph(graph: fx.Graph) -> None:
        final.append(([comm_of(node) or node.name for node in graph.nodes], calls_of(graph)))

    options = {"cluster": models.SLOW_WIRE} if slow_wire else {}
    backend = functools.partial(vescale, options=options, on_graph=on_graph)
    agreed = mock.patch.object(overlap, "agreed_schedule", wraps=overlap.agreed_schedule)
    with fake_world(2), agreed as scheduled:
        call = torch.compile(vc.fully_shard(models.build(build)), backend=backend, dynamic=False)
        codes = code_written_for(lambda: call(*models.batches(1, vocab, shape=shape)[0]).backward())
    return [
        Lowered(part, context, tasks, schedule, *graph, code)
        for part, (schedule, tasks, _, context), graph, code in zip(
            (Part.FORWARD, Part.BACKWARD), (each.args for each in scheduled.call_args_list), final, codes, strict=True
        )
    ]


def between_collectives(calls: list[Call]) -> list[tuple[Call | None, list[Call]]]:
    """Each launch and wait with the products up to the next, whose order is free."""
    found: list[tuple[Call | None, list[Call]]] = [(None, [])]
    for call in calls:
        if re.fullmatch(COLLECTIVES, call.operator):
            found.append((call, []))
        else:
            found[-1][1].append(call)
    return [(collective, sorted(products)) for collective, products in found]


over_a_slow_wire = functools.partial(lowered, models.deep, 11, (2, 12), True)
language_model = functools.partial(lowered, five_layers, 64, (1, 16), False)
both = pytest.mark.parametrize("step", [over_a_slow_wire, language_model], ids=["over_a_slow_wire", "language_model"])
Step = Callable[[], list[Lowered]]


@both
def test_launches_and_waits_stand_between_the_tasks_that_the_schedule_puts_them_between(step: Step):
    for graph in step():
        assert graph.placed == graph.planned


@both
def test_generated_code_launches_and_waits_in_the_order_of_the_schedule(step: Step):
    for graph in step():
        assert graph.schedule_in_code == graph.context.summaries[graph.part].schedule


@both
def test_generated_code_computes_the_same_products_between_a_launch_and_its_wait_as_the_graph(step: Step):
    for graph in step():
        assert between_collectives(graph.calls_in_code) == between_collectives(graph.calls)


def test_what_crosses_to_the_backward_is_launched_before_the_head_and_the_loss_are_computed():
    forward, _ = language_model()
    operators = [call.operator for call in forward.calls_in_code]
    after = operators[operators.index("carry_all_gather") + 1 :]
    assert after and all(re.fullmatch(PRODUCTS, operator) for operator in after)
    kernels = re.findall(r"^ +(cpp_fused\w*|torch\.ops\.vescale\.carry_all_gather)", forward.code, re.MULTILINE)
    loss = [place for place, kernel in enumerate(kernels) if "nll_loss" in kernel]
    assert loss and min(loss) > kernels.index("torch.ops.vescale.carry_all_gather")


def test_generated_code_touches_no_slot_while_it_is_gathered_into():
    """What reads a unit's last parameters is fused with later kernels, and must not move behind the next launch."""
    launches = 0
    for graph in language_model():
        flying: set[str] = set()
        for line in re.findall(r"^ +(?:torch\.ops|extern_kernels|cpp_fused).*$", graph.code, re.MULTILINE):
            slots = set(re.findall(r"slot_\d+", line))
            if "wait_all_gather" in line:
                flying -= slots
            assert not slots & flying, line
            if "start_all_gather" in line:
                flying |= slots
                launches += 1
    assert launches >= 10
