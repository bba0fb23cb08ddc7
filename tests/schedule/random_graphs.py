"""Random steps of fully sharded training, small enough for exhaustive search."""

from hypothesis import strategies as st

from vescale_compile.schedule import Compute, TaskGraph, Transfer


@st.composite
def sharded_steps(
    draw: st.DrawFn,
    units: int,
    *,
    lanes: int = 1,
    merge: bool = False,
    load: float = 0.0,
    launch: float = 0.0,
    issue: int = 0,
    then: int = 0,
    apart: bool = False,
) -> TaskGraph:
    """A forward and a backward over ``units`` units, each gathered twice and reduced once, with scratch up to the
    size of what is reduced.

    Args:
        issue: the most seconds that the host takes for a task, for the call of a collective, and before and after all.
        then: the most seconds that a reduction takes after the wire.
    """
    seconds = st.integers(1, 8).map(float)
    sizes = st.integers(1, 4)
    positions = 2 * units
    latency = float(draw(st.integers(0, 1)))
    compute = [
        Compute(
            f"task {position}",
            draw(seconds),
            min(position, positions - position) + draw(st.integers(0, 3)),
            float(draw(st.integers(0, issue))),
        )
        for position in range(positions)
    ]
    gathers, repeats, reductions = [], [], []
    for unit in range(units):
        last = positions - 1 - unit
        wire_time, size = draw(seconds), draw(sizes)
        taken = {"load": load, "launch": launch, "issue": issue / 8, "call": float(draw(st.integers(0, issue)))}
        common = {"lane": "gathers", "merge": "gathers" if merge else None, "output_bytes": size, **taken}
        gathers.append(Transfer(f"gather {unit}", latency, wire_time, readers=(unit,), **common))
        repeats.append(Transfer(f"gather {unit} again", latency, wire_time, readers=(last,), repeats=unit, **common))
        reductions.append(
            Transfer(
                f"reduce {unit}",
                latency,
                wire_time + draw(st.integers(0, 2)),
                writers=(last,),
                input_bytes=size,
                scratch_bytes=draw(st.integers(0, size)),
                lane="gathers" if lanes == 1 else "reductions",
                merge="reductions" if merge else None,
                then_latency=latency if then else 0.0,
                then_wire_time=float(draw(st.integers(0, then))) if then else 0.0,
                **taken,
            )
        )
    before, after = (float(draw(st.integers(0, issue))) if issue else 0.0 for _ in range(2))
    return TaskGraph(tuple(compute), (*gathers, *repeats, *reductions), apart, before, after)


@st.composite
def any_graphs(draw: st.DrawFn) -> TaskGraph:
    """Up to five transfers of any kind, over two lanes."""
    positions = draw(st.integers(1, 5))
    numbers = st.integers(0, 6)
    compute = [Compute(f"task {i}", float(draw(numbers)), draw(numbers)) for i in range(positions)]
    uses = st.lists(st.integers(0, positions - 1), min_size=1, max_size=3, unique=True).map(sorted)
    wakeup = draw(st.sampled_from([0.0, 1.0]))
    transfers = []
    for index in range(draw(st.integers(0, 5))):
        used = tuple(draw(uses))
        writers, readers = draw(st.sampled_from([((), used), (used, ()), (used[:1], used[1:])]))
        input_bytes = draw(numbers) if writers else 0
        output_bytes = min(draw(numbers), input_bytes) if writers and readers else draw(numbers) if readers else 0
        transfers.append(
            Transfer(
                f"transfer {index}",
                float(draw(st.integers(0, 2))),
                float(draw(numbers)),
                writers=writers,
                readers=readers,
                input_bytes=input_bytes,
                output_bytes=output_bytes,
                scratch_bytes=draw(numbers),
                lane=draw(st.sampled_from("xy")),
                load=draw(st.sampled_from([0.0, 0.2])),
                stretch=draw(st.sampled_from([1.0, 1.5])),
                wakeup=wakeup,
                launch=draw(st.sampled_from([0.0, 0.5])),
                then_latency=draw(st.sampled_from([0.0, 1.0])),
                then_wire_time=draw(st.sampled_from([0.0, 2.0])),
                merge=draw(st.sampled_from([None, "mergeable"])),
            )
        )
    return TaskGraph(tuple(compute), tuple(transfers), draw(st.booleans()))
