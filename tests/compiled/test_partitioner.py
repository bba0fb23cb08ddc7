"""What Inductor's cache knows of the partitioner with our passes around it."""

import torch
from torch._inductor.custom_graph_pass import CustomPartitionerFn

from vescale_compile.torch_internals.aot import WrappedPartitioner


class Users(CustomPartitionerFn):
    """One that a user has given to Inductor."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, gm, joint_inputs, **kwargs):
        raise NotImplementedError

    def uuid(self):
        return self.name


def identity(policies: str, users: CustomPartitionerFn | None) -> object:
    with torch._inductor.config.patch(custom_partitioner_fn=users):
        return WrappedPartitioner(lambda gm, outputs, cut: cut(gm), policies).uuid()


def test_other_policies_and_another_partitioner_of_the_users_are_told_apart():
    assert len({identity(policies, Users(name)) for policies in "ab" for name in "xy"} | {identity("a", None)}) == 5


def test_equal_ones_are_equal():
    assert identity("a", Users("x")) == identity("a", Users("x"))
