"""Views of parameters by strides that a program gives itself."""

import re

import models
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.slow  # left out of `make test-fast`


class Strides(nn.Module):
    """Reads a parameter that is the second of its unit, by ``as_strided``, in one of the ways in which it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.w = (nn.Parameter(torch.arange(16.0).view(4, 4)) for _ in range(2))
        self.how = "without"

    def view(self):
        match self.how:
            case "without":
                return self.w[1].as_strided((2, 2), (4, 1))
            case "without, of what is computed":
                largest = (self.w + 1).max(0).values.as_strided((2,), (2,)) - torch.tensor([13.0, 15.0])
                return (self.w * 2)[1:].as_strided((2, 2), (4, 1)) / 2 + largest
            case "without, copied":
                return torch.as_strided_copy(self.w[1], (2, 2), (4, 1))
            case "copy of it":
                return self.w.clone().as_strided((2, 2), (4, 1), 4)
            case "method":
                return self.w.as_strided((2, 2), (4, 1), 4)
            case "function":
                return torch.as_strided(self.w.t(), (2, 2), (4, 1), storage_offset=4)
            case "operator":
                return torch.ops.aten.as_strided.default(self.w, (2, 2), (4, 1), 4)
            case "copy":
                return torch.as_strided_copy(self.w, (2, 2), (4, 1), 4)
            case "scatter":
                return self.w.as_strided_scatter(torch.ones(2, 2), (2, 2), (4, 1), 4)
            case "checkpointed":
                return checkpoint(
                    lambda x: x * self.w.as_strided((2, 2), (4, 1), 4), torch.ones(1), use_reentrant=False
                )

    def forward(self):
        return self.view().sum() + 0 * self.first.sum()


@pytest.mark.parametrize(
    ("how", "lowering"),
    [
        *(("without", "eager"), ("copy of it", "eager"), ("without", "inductor"), ("without, copied", "inductor")),
        ("without, of what is computed", "inductor"),
    ],
)
@on_ranks(2)
def test_strides_count_from_where_a_parameter_begins(how, lowering):
    torch._dynamo.reset()
    model, call = models.sharded(Strides, compile=lowering)
    model.how = how
    assert call().item() == 4 + 5 + 8 + 9


@pytest.mark.parametrize("how", ["method", "function", "operator", "copy", "scatter", "checkpointed"])
@on_ranks(2)
def test_an_offset_into_memory_is_refused(how):
    torch._dynamo.reset()
    model, call = models.sharded(Strides)
    model.how = how
    with pytest.raises(Exception, match="parameter 'w' is viewed by as_strided at a storage_offset") as caught:
        call()
    assert f"rank {dist.get_rank()}" in str(caught.value)
    assert re.search(r"it is viewed by line \d+ of \S+test_strided\.py", str(caught.value))
