"""What a program notes of places in it that are compiled, by ``torch.fx.traceback.annotate`` or what is made of it."""

import copy

import models
import pytest
import torch
from ranks import fake_world
from torch import nn
from torch.fx.traceback import annotate

import vescale_compile as vc

pytestmark = pytest.mark.slow  # left out of `make test-fast`

LEAST = 0.3  # of what activations take


class Blocks(nn.Module):
    """Two linear layers, the first of them in one of the ways that streams are used."""

    def __init__(self, streams: str = "") -> None:
        super().__init__()
        self.streams = streams
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            if self.streams == "another stream":
                with annotate({"stream": 1}):  # as Dynamo notes `with torch.cuda.stream(...)`
                    x = layer(x)
            else:
                x = layer(x).relu()
            if self.streams == "another is waited for":
                torch.ops.streams.wait_stream(0, 1)
        return x


@pytest.mark.parametrize("streams", ["another stream", "another is waited for"])
def test_streams_of_the_program_are_refused(streams):
    with fake_world(2):
        _, call = models.sharded(lambda: Blocks(streams))
        with pytest.raises(
            Exception, match=r"\[rank 0\] compiled code uses streams or events.* by line \d+ of \S+test_annotations"
        ):
            call(torch.ones(4, 8))


@pytest.mark.skipif(not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="PyTorch 2.13 has it")
def test_gathers_count_as_what_they_are_gathered_for():
    """PyTorch refuses a memory budget that not all of a graph is annotated with."""
    plain = Blocks()
    with fake_world(1):
        model = vc.fully_shard(copy.deepcopy(plain))

        def loss(x):
            with torch.autograd.graph.region_activation_memory_budget(LEAST):
                return model(x).sum()

        torch.compile(loss, backend="vescale", options={"lowering": "eager"})(torch.ones(4, 8)).backward()
        plain(torch.ones(4, 8)).sum().backward()
        models.assert_gradients_of(model, plain, atol=0)
