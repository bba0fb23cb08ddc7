"""What would compute with parameters that nobody gathers is refused."""

import pytest
import torch
from ranks import on_ranks

import vescale_compile as vc


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


@on_ranks(2)
def test_what_a_parameter_was_before_it_was_sharded_is_refused_in_a_forward():
    class Listed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)
            self.weights = [self.inner.weight]

        def forward(self, x):
            return self.inner(x) @ self.weights[0]

    torch._dynamo.reset()
    call = torch.compile(vc.fully_shard(Listed()), backend="vescale", options={"lowering": "eager"})
    with pytest.raises(Exception, match=r"what parameter 'inner.weight' was before fully_shard.*ParameterList"):
        call(torch.ones(2, 4))
