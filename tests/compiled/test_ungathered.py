"""What would compute with parameters that nobody gathers is refused."""

from unittest import mock

import pytest
import torch
from ranks import on_ranks

import vescale_compile as vc
from vescale_compile.runtime import eager

pytestmark = pytest.mark.slow  # left out of `make test-fast`


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_ranks(1)
def test_a_sharded_model_is_not_compiled_by_a_backend_that_gathers_nothing(backend):
    torch._dynamo.reset()
    call = torch.compile(vc.fully_shard(torch.nn.Linear(4, 2)), backend=backend)
    with pytest.raises(Exception, match=r"\[rank 0\] .*shape \(2, 4\).*backend='vescale'"):
        call(torch.ones(3, 4))


@on_ranks(1)
def test_a_sharded_model_is_not_exported():
    model = vc.fully_shard(torch.nn.Linear(4, 2))
    with pytest.raises(Exception, match=r"torch\.export takes a model as it is before fully_shard"):
        torch.export.export(model, (torch.ones(3, 4),))


class Listed(torch.nn.Module):
    """Keeps a parameter where fully_shard does not find it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.weights = [self.inner.weight]

    def forward(self, x):
        return self.inner(x) @ self.weights[0]


@on_ranks(2)
def test_what_a_parameter_was_before_it_was_sharded_is_refused_in_a_forward():
    torch._dynamo.reset()
    call = torch.compile(vc.fully_shard(Listed()), backend="vescale", options={"lowering": "eager"})
    with pytest.raises(Exception, match=r"what parameter 'inner.weight' was before fully_shard.*ParameterList"):
        call(torch.ones(2, 4))


@on_ranks(2)
def test_what_a_parameter_was_before_it_was_sharded_gets_no_gradient_in_uncompiled_code():
    model = vc.fully_shard(Listed())
    with pytest.raises(RuntimeError, match=r"\[rank \d\].*what parameter 'inner.weight' was before fully_shard"):
        model(torch.ones(2, 4)).sum().backward()


@on_ranks(1)
def test_an_attribute_that_is_missing_while_a_parameter_is_gathered_does_not_give_the_shard():
    model = vc.fully_shard(torch.nn.Linear(4, 2))
    gathering = mock.patch.object(eager, "unsharded", side_effect=AttributeError("no attribute 'pool'"))
    with gathering, pytest.raises(RuntimeError, match=r"\[rank 0\].*'weight'.*cannot be read: no attribute 'pool'"):
        model(torch.ones(3, 4))


@on_ranks(2)
def test_an_embedding_with_sparse_gradients_is_refused_before_it_is_sharded():
    model = torch.nn.Sequential(torch.nn.Embedding(4, 4, sparse=True), torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"fully_shard: 0 has sparse gradients.*0\.sparse = False"):
        vc.fully_shard(model)
    model[0].sparse = False
    vc.fully_shard(model)(torch.arange(4)).sum().backward()


@on_ranks(2)
def test_a_sharded_model_is_not_wrapped_in_distributed_data_parallel():
    model = vc.fully_shard(torch.nn.Linear(4, 2))
    with pytest.raises(NotImplementedError, match="Leave out DistributedDataParallel"):
        torch.nn.parallel.DistributedDataParallel(model)
