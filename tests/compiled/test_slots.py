"""Slots are places in memory that graphs have in common, of whatever sizes and dtypes."""

import pytest
import torch
from ranks import fake_world
from torch.multiprocessing.reductions import StorageWeakRef

from vescale_compile.runtime.pool import SlotSpec, StepSlots, pooled_bytes

CPU = torch.device("cpu")


def addresses(*graphs: list[SlotSpec]) -> list[list[int]]:
    """Where the slots of living graphs lie."""
    steps = [StepSlots().add(lambda slots: slots, specs) for specs in graphs]
    steps = [*steps, *steps]  # the second time none has to grow
    return [[slot.data_ptr() for slot in step([])] for step in steps][len(graphs) :]


def test_parameters_of_one_graph_lie_where_another_has_gradients_of_another_dtype():
    parameters = [SlotSpec(64, torch.bfloat16, CPU), SlotSpec(16, torch.bfloat16, CPU, offset=512)]
    gradients = [SlotSpec(32, torch.float32, CPU)]
    (large, small), (reduced,) = addresses(parameters, gradients)
    assert large == reduced == small - 512
    assert pooled_bytes([parameters, gradients]) == 512 + 32


def test_slots_of_a_graph_may_have_memory_in_common():
    first, second = SlotSpec(256, torch.float32, CPU), SlotSpec(128, torch.float32, CPU, offset=512)
    slots = StepSlots().add(lambda slots: slots, [first, second])([])
    slots[0].zero_()  # other graphs of this process may have been there
    slots[1].fill_(7)
    assert first.overlaps(second)
    assert slots[0].tolist() == [0] * 128 + [7] * 128
    assert pooled_bytes([[first, second]]) == 1024


def test_slots_that_touch_have_no_memory_in_common():
    first, second = SlotSpec(128, torch.float32, CPU), SlotSpec(128, torch.float32, CPU, offset=512)
    assert not first.overlaps(second)


def test_memory_is_as_large_as_any_living_graph_wants():
    first, second = ([SlotSpec(numel, torch.float32, CPU)] for numel in (8, 6))
    (larger,), (smaller,) = addresses(first, second)
    assert larger == smaller
    assert pooled_bytes([first, second]) == 32


def test_memory_that_grows_moves_the_slots_of_all_graphs_and_is_freed_before():
    alone = "what no other graph of this process uses"
    specs = (SlotSpec(numel, torch.float32, CPU, alone) for numel in (3, 9))
    small, large = (StepSlots().add(lambda slots: slots, [spec]) for spec in specs)
    before = StorageWeakRef(small([])[0].untyped_storage())
    (slot,) = large([])
    assert before.expired()
    assert small([])[0].data_ptr() == slot.data_ptr()


def test_codes_and_what_is_carried_lie_apart():
    sizes = [SlotSpec(8, torch.float32, CPU), SlotSpec(32, torch.uint8, CPU), SlotSpec(8, torch.float32, CPU, "0")]
    found = addresses(*([size] for size in sizes))
    assert len({address for (address,) in found}) == 3
    assert pooled_bytes([[size] for size in sizes]) == 96


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_finite_parameters_leave_in_padding_is_finite_as_a_gradient(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    finite = every[every.isfinite()]
    for low in (finite[0], finite[-1], finite.max(), finite.min()):
        assert torch.stack([low.expand_as(finite), finite], dim=1).view(torch.float32).isfinite().all()


def test_where_each_dtype_has_memory_of_its_own_none_lies_where_another_did():
    graphs = ([SlotSpec(8, dtype, CPU, by_dtype=True)] for dtype in (torch.float32, torch.bfloat16))
    (parameters,), (gradients,) = addresses(*graphs)
    assert parameters != gradients


def test_a_graph_that_is_called_by_an_operator_of_another_is_refused():
    inner = StepSlots().add(lambda slots: slots, [SlotSpec(8, torch.float32, CPU)])
    outer = StepSlots().add(lambda slots: inner([]), [SlotSpec(8, torch.float32, CPU)])
    with fake_world(2, rank=1):
        with pytest.raises(RuntimeError, match=r"\[rank 1\].*while another runs"):
            outer([])
        inner([])  # the next call finds nothing running
