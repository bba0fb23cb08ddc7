"""Task graphs of published models on described clusters, a layer a unit.

They are made from the shapes of the parameters alone (see ``planner.models``), where no code of the model is at hand.
What they assume is in :data:`ASSUMPTIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from vescale_compile.cost import Cluster, CollectiveCost, averaged_over_replicas, collective_cost
from vescale_compile.cost.collectives import NOTHING
from vescale_compile.planner.models import PUBLISHED, Shapes, published
from vescale_compile.schedule import Compute, TaskGraph, Transfer

EXPERTS_PER_TOKEN = {"gpt-oss-120b": 4, "deepseek-v3-671b": 8, "kimi-k2-1t": 8}
PARAM_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 4, 16  # bf16 gathers, fp32 reductions; fp32 master, gradient and AdamW

ASSUMPTIONS = """\
Matrix products and attention at the share of the device's peak that large ones reach, everything else hidden by them;
activation checkpointing of every layer; logits of all tokens at once, in bf16 and for the loss in fp32; tokens spread
evenly over experts, which are gathered like all parameters (no expert parallelism); bf16 gathers, fp32 reductions, fp32
parameters, gradients and AdamW states in memory, what is gathered and what is reduced apart; communication takes
nothing from the computation beside it."""


def published_graph(model: str, cluster: Cluster, tokens: int, *, sequence: int = 8192, replicas: int = 1) -> TaskGraph:
    """A training step with activation checkpointing, each layer in two tasks forward and two backward.

    Args:
        model: one of ``planner.models.PUBLISHED``.
        cluster: where it runs, or one of ``replicas`` such clusters that follow one another: the ranks that shard the
            parameters.
        tokens: of each rank and step.
        sequence: tokens that attend to one another.
        replicas: over which gradients are averaged, once they are reduced.
    """
    shapes = published(model).units
    units = {name: sum(map(math.prod, unit.values())) for name, unit in shapes.items()}
    states = sum(units.values()) * STATE_BYTES // cluster.ranks
    compute = _computation(model, shapes, cluster, tokens, sequence, states)
    return TaskGraph(tuple(compute), tuple(_communication(units, cluster, replicas)), apart=True)


def _layers(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in ("embedding", "head")]


def _computation(
    model: str, shapes: Mapping[str, Shapes], cluster: Cluster, tokens: int, sequence: int, states: int
) -> list[Compute]:
    """The tasks of a step, in its order, beside so many bytes of ``states``."""
    config, layers = PUBLISHED[model][1], _layers(shapes)
    hidden = config["hidden_size"]
    forward = [
        cluster.device.seconds(
            tokens * (2 * _active_parameters(model, shapes[name]) + _attention_flops(config, layer, sequence)),
            0,
            "bfloat16",
        )
        for layer, name in enumerate(layers)
    ]
    scores = cluster.device.seconds(2 * tokens * hidden * config["vocab_size"], 0, "bfloat16")
    saved, working = 2 * tokens * hidden, 40 * tokens * hidden

    compute = [Compute("embedding", 1e-5, states + saved)]
    for index, seconds in enumerate(forward):
        live = states + (index + 1) * saved + working
        compute += [Compute(f"{layers[index]} {part}", seconds / 2, live) for part in ("attention", "mlp")]
    live = states + len(layers) * saved + 8 * tokens * hidden
    logits = tokens * config["vocab_size"]
    compute.append(Compute("head", scores, live + (2 + 4) * logits))
    compute.append(Compute("head backward", 2 * scores, live + (2 + 4 + 4) * logits))
    for index, seconds in reversed(list(enumerate(forward))):
        live = states + (index + 1) * saved + 2 * working
        compute += [Compute(f"{layers[index]} {part} backward", 1.5 * seconds, live) for part in ("mlp", "attention")]
    return [*compute, Compute("embedding backward", 1e-5, states + saved)]


def _uses(layers: Sequence[str]) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Each unit, the tasks of the forward that read it, and those of the backward, by their places in a step."""
    end = 4 * len(layers) + 3
    yield "embedding", (0,), (end,)
    for index, name in enumerate(layers):
        first, second = 1 + 2 * index, 2 + 2 * index
        yield name, (first, second), (end - second, end - first)
    yield "head", (1 + 2 * len(layers),), (2 + 2 * len(layers),)


def _communication(units: Mapping[str, int], cluster: Cluster, replicas: int) -> Iterator[Transfer]:
    """Of units of so many elements: gathers, gathers of the backward, and reductions."""
    uses = list(_uses(_layers(units)))
    across = cluster.of(replicas, stride=cluster.ranks)
    gathers = {name: collective_cost(cluster, "all_gather", PARAM_BYTES * numel) for name, numel in units.items()}
    for name, forward, _ in uses:
        yield _transfer(f"gather {name}", gathers[name], readers=forward, output_bytes=PARAM_BYTES * units[name])
    for index, (name, _, backward) in enumerate(uses):
        if name != "embedding":  # its gradient does not depend on it
            again, nbytes = f"gather {name} again", PARAM_BYTES * units[name]
            yield _transfer(again, gathers[name], readers=backward, output_bytes=nbytes, repeats=index)
    for name, _, backward in uses:
        nbytes = GRADIENT_BYTES * units[name]
        cost = collective_cost(cluster, "reduce_scatter", nbytes)
        cost, then = averaged_over_replicas(cost, cluster, across, nbytes / cluster.ranks, beside=True)
        yield _transfer(f"reduce {name}", cost, then, writers=backward, input_bytes=nbytes)


def _transfer(name: str, cost: CollectiveCost, then: CollectiveCost = NOTHING, **uses: object) -> Transfer:
    """One collective, and what it takes on other links afterwards."""
    return Transfer(
        name,
        cost.latency,
        cost.wire_time,
        load=cost.load,
        stretch=cost.stretch,
        wakeup=cost.wakeup,
        launch=cost.launch,
        call=cost.call + then.call,
        then_latency=then.latency,
        then_wire_time=then.wire_time,
        **uses,  # type: ignore[arg-type]
    )


def _attention_flops(config: Mapping[str, Any], layer: int, sequence: int) -> int:
    """Of a token in a layer's forward: the scores, and the values' sum, over half of the sequence on average, or over
    the window of a layer that has one."""
    window = config.get("sliding_window") if layer % 2 == 0 else None
    attended = sequence / 2 if window is None else min(window, sequence / 2)
    latent = config.get("qk_nope_head_dim", 0) + config.get("qk_rope_head_dim", 0), config.get("v_head_dim", 0)
    widths = sum(latent) or 2 * config["head_dim"]
    return int(2 * attended * config["num_attention_heads"] * widths)


def _active_parameters(model: str, shapes: Shapes) -> float:
    """Parameters of a layer that a token meets: of the experts, those that it is sent to."""
    config, active = PUBLISHED[model][1], 0.0
    for name, shape in shapes.items():
        share = 1.0
        if ".experts" in name:
            share = EXPERTS_PER_TOKEN[model] / config.get("num_local_experts", config.get("n_routed_experts"))
        active += share * math.prod(shape)
    return active
