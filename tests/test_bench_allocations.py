"""How far a profiled step's allocations rise, of real profiles."""

import torch
from kernels import allocated_by

BLOCK = 2**26  # bytes, large enough for pages of its own: freed, its address is the next one's


def block(nbytes: int = BLOCK) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def test_what_lives_at_the_same_time_counts_together():
    def step():
        for _ in range(2):
            both = block(), block(1024)
            del both

    assert allocated_by(step) == BLOCK + 1024


def test_a_block_from_before_the_step_does_not_count_with_the_size_an_earlier_profile_saw_at_its_address():
    held = []
    allocated_by(lambda: held.append(block()))
    earlier = held.pop().data_ptr()
    held.append(block(BLOCK - 64))
    assert held[0].data_ptr() == earlier

    def step():
        held.clear()
        block(1024)

    assert allocated_by(step) == 1024
