"""Names of process groups that graphs hold."""

import pytest
import torch.distributed as dist
from ranks import fake_world, on_ranks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh

from vescale_compile.runtime.groups import group_named, name_group


@on_ranks(4)
def test_groups_have_one_name_on_all_ranks_and_are_found_by_it():
    mesh = init_device_mesh("cpu", (2, 2))
    names = [name_group(mesh, dim) for dim in range(2)]
    of_all: list[list[str]] = [[]] * 4
    dist.all_gather_object(of_all, names)
    assert of_all == [names] * 4
    assert [group_named(name) for name in names] == [mesh.get_group(0), mesh.get_group(1)]


@on_ranks(4)
def test_groups_of_one_mesh_and_of_another_of_its_shape_have_names_of_their_own():
    meshes = [init_device_mesh("cpu", (2, 2)) for _ in range(2)]
    names = {name_group(mesh, dim): mesh.get_group(dim) for mesh in meshes for dim in range(2)}
    assert len(names) == 4
    assert all(group_named(name) is group for name, group in names.items())


def test_a_group_is_named_where_tensors_are_fake():
    with fake_world(8):
        mesh = init_device_mesh("cpu", (2, 4))
        with FakeTensorMode():
            name = name_group(mesh, 1)
        assert group_named(name) is mesh.get_group(1)


def test_a_group_has_the_name_of_the_one_that_was_destroyed_before_it():
    def name() -> str:
        mesh = init_device_mesh("cpu", (2, 4))
        found = name_group(mesh, 1)
        assert group_named(found) is mesh.get_group(1)
        return found

    names = []
    for _ in range(2):
        with fake_world(8, rank=5):
            names.append(name())
    assert names[0] == names[1]
    with pytest.raises(RuntimeError):
        group_named(names[0])


def test_a_group_that_has_got_the_name_of_a_destroyed_one_at_pytorch_is_another():
    with fake_world(8):
        first = name_group(init_device_mesh("cpu", (2, 4)), 1)
    with fake_world(8):
        dist.new_group(list(range(4)))  # and so the groups of the mesh have later names
        mesh = init_device_mesh("cpu", (2, 4))
        assert name_group(mesh, 1) == first
        assert group_named(first) is mesh.get_group(1)
