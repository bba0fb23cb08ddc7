"""What kernels read where memory was written before, and after."""

import contextlib
import importlib
from collections.abc import Iterator

import models
import pytest
import torch
from ranks import fake_world, on_ranks
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from written import code_written_for

import vescale_compile as vc
from vescale_compile import backend
from vescale_compile.torch_internals.inductor_reads import reads_known_by_their_writes

overlap = importlib.import_module("vescale_compile.passes.overlap")  # which the pass of that name hides

pytestmark = pytest.mark.slow  # left out of `make test-fast`


@torch.library.custom_op("tests::fill", mutates_args={"out"})
def fill(out: Tensor, value: Tensor) -> None:
    out.copy_(value)


def fill_and_read(memory: Tensor, value: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """A kernel of two loops stands before the write, and one behind it reads the same ``x`` in a single loop."""
    before = torch.sigmoid(x * x.T)
    fill(memory, value)
    return before, torch.sigmoid(x * memory)


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
    """Has Inductor generate code as we do: what it compiled before this, or without us, is not found."""
    torch._dynamo.reset()
    with inductor_config.patch(force_disable_caches=True), reads_known_by_their_writes():
        yield


def test_a_read_stays_behind_the_write_before_it():
    memory, value, x = torch.zeros(16, 16), torch.rand(16, 16), torch.rand(16, 16)
    expected = fill_and_read(memory.clone(), value, x)
    with compiled_anew():
        found = torch.compile(fill_and_read)(memory, value, x)
    torch.testing.assert_close(found, expected)


def test_rows_that_one_iteration_computes_keep_apart_what_loops_hand_each_other():
    """The gradient's loops over rows could be one, of vectors: they read rows and columns."""

    def of_rows_and_columns(x: Tensor) -> Tensor:
        fixed = x.detach()
        return (nn.functional.layer_norm(fixed + torch.sin(fixed * x[0]).T, (16,)) * fixed).mean()

    start = torch.rand(16, 16, generator=torch.Generator().manual_seed(0))
    expected, found = start.clone().requires_grad_(), start.clone().requires_grad_()
    of_rows_and_columns(expected).backward()
    with compiled_anew():
        torch.compile(of_rows_and_columns)(found).backward()
    torch.testing.assert_close(found.grad, expected.grad)


class Reversed(nn.Module):
    """Layers whose gradients mix elements of their parameters, in generated code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ParameterList([torch.randn(32)]) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for (gain,) in self.layers:
            x = torch.tanh(x * torch.sin(gain * gain.flip(0)))
        return x.square().mean()


class Gated(nn.Module):
    """The last layer's parameter is read by what could be a part of a kernel that comes long before it is gathered."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(16, 8), (16, 16), (8, 16)]
        self.layers = nn.ModuleList(nn.ParameterList([torch.randn(size) / 4 for size in sizes]) for _ in range(6))

    def forward(self, start: Tensor) -> Tensor:
        (first, _, _), *layers, (_, weight, last) = self.layers
        gate, x = torch.sigmoid(start * first.T), start
        for _, product, _ in layers:
            x = torch.tanh(x @ product) @ product
        x = torch.tanh(x @ weight + gate @ weight + torch.sigmoid(start * last) @ weight)
        for _, product, _ in self.layers:
            x = torch.tanh(x @ product)
        return x.square().mean()


class Halved(nn.Module):
    """Gradients are cast where they are copied over the parameters that they are computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ParameterList([torch.randn(32, 32).half()]) for _ in range(4))
        self.gain = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        weights = [weight.float() for (weight,) in self.layers]
        return (x * self.gain).square().mean() + sum((w * w.flip(0).detach()).sum() for w in weights) / 1024


class Filtered(nn.Module):
    """Inductor copies the weight of the convolution to another layout, where the backward is to read it too."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.head = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 10)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.filter(image).flatten(2).mean(2)).square().mean()


@pytest.mark.parametrize(
    ("program", "shape", "reshard"),
    [(Reversed, (4, 32), True), (Gated, (8, 16), True), (Halved, (8, 32), True), (Filtered, (4, 3, 16, 16), False)],
)
@on_ranks(2)
def test_kernels_read_the_parameters_that_the_program_reads(program, shape, reshard):
    torch._dynamo.reset()
    options = {"cluster": models.SLOW_WIRE, "reshard_after_forward": reshard}
    model, call = models.sharded(program, compile="inductor", **options)
    reference = models.build(program)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    loss, expected = call(x), reference(x)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    models.assert_gradients_of(model, reference, atol=1e-6)


def test_kernels_that_would_read_something_else_are_refused(monkeypatch):
    monkeypatch.setattr(backend, "reads_known_by_their_writes", contextlib.nullcontext)
    torch._dynamo.reset()
    with fake_world(2):
        model = torch.compile(vc.fully_shard(Gated()), backend="vescale", options={"cluster": models.SLOW_WIRE})
        with pytest.raises(Exception, match=r"read (slot_|buf)\d+ while it does not hold"):
            code_written_for(lambda: model(torch.ones(8, 16)).backward())


def test_kernels_that_would_read_what_was_not_gathered_yet_are_refused(monkeypatch):
    monkeypatch.setattr(overlap, "_put_views_behind_waits", lambda *_: None)
    torch._dynamo.reset()
    with fake_world(2):
        sharded = vc.fully_shard(Filtered(), reshard_after_forward=False)
        model = torch.compile(sharded, backend="vescale", options={"cluster": models.SLOW_WIRE})
        with pytest.raises(Exception, match=r"read buf\d+ while it does not hold"):
            code_written_for(lambda: model(torch.ones(4, 3, 16, 16)))
