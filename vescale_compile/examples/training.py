"""Train a byte-level Llama on one process of a group: shard, compile, optimize, evaluate.

The process group is the caller's. All ranks call `train`; rank 0 prints.
"""

import functools
import json
import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import vescale_compile as vc
from vescale_compile.examples.evaluation import continuation, mean_loss
from vescale_compile.examples.llama import Llama, LlamaConfig
from vescale_compile.examples.optimizers import RECIPES
from vescale_compile.examples.progress import Progress
from vescale_compile.examples.text import Batch, batches, read_text
from vescale_compile.mesh import mesh_of_all_ranks

WARMUP_FRACTION = 0.05
FINAL_LEARNING_RATE = 0.05  # of the peak
GRADIENT_NORM = 1.0
VALIDATION_WINDOWS = 32
PROMPT_BYTES = 80


@dataclass(frozen=True)
class TrainSettings:
    """What a run does, option by option of `python -m vescale_compile train`.

    `lowering`, `reshard` and `param_dtype` are for the vescale backend. `seconds` is looked at each
    `log_every` steps; the learning rate follows `steps` alone, so that a run can be repeated.
    """

    model: LlamaConfig
    text: Path
    threads: int | None
    backend: str
    lowering: str
    ddp: bool
    reshard: bool
    param_dtype: torch.dtype
    optim: str
    lr: float
    steps: int
    seconds: float | None
    batch: int
    seq: int
    accumulate: int
    seed: int
    log_every: int
    sample: int
    temperature: float
    prompt: str | None
    json: Path | None


@dataclass
class Report:
    """What a run measured. Losses are in nats per byte, averaged over the ranks."""

    parameters: int
    ranks: int
    curve: list[tuple[int, float]] = field(default_factory=list)
    """(step, mean loss of the steps since the entry before)"""
    first_step_seconds: float = math.nan
    """compilation and one step"""
    tokens_per_second: float = math.nan
    """of all ranks together, without the first step"""
    validation_loss: float = math.nan
    prompt: str = ""
    sample: str = ""
    """what the model wrote after the prompt"""
    peak_memory_bytes: list[int] = field(default_factory=list)
    """for each rank: of the process on a CPU, of the allocator on a GPU"""


class Training(NamedTuple):
    """A model ready to be trained."""

    model: nn.Module
    """holds the parameters"""
    forward: Callable[..., Tensor]
    """the model, compiled"""
    no_sync: Callable[[], AbstractContextManager[Any]]
    """inside it a backward leaves gradients unreduced"""


def train(settings: TrainSettings, device: torch.device) -> Report:
    """Train on every rank of the default process group; each returns the report, and rank 0 prints it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = read_text(settings.text)
    deal = functools.partial(batches, length=settings.seq, rank=rank, world_size=world_size)
    data = deal(text.train, batch=settings.batch, seed=settings.seed)
    unseen = deal(text.validation, batch=1, seed=0)  # before any training: the text may be too short for it
    training = prepare(settings, device)
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    report = Report(parameters, world_size)
    if rank == 0:
        print(
            f"{parameters / 1e6:.2f}M parameters on {world_size} ranks ({device.type})\n"
            f"{len(text.train) / 1e6:.1f} MB of text from {settings.text}\n"
            f"compiling with {settings.backend}…",
            flush=True,
        )
    optimize(settings, training, data, report, device)
    if rank == 0:
        print("compiling for inference…", flush=True)
    report.validation_loss = mean_loss(training.forward, unseen, windows=VALIDATION_WINDOWS, device=device)
    if settings.sample:
        first_unseen = bytes(text.validation[:PROMPT_BYTES].tolist())
        report.prompt = first_unseen.decode(errors="replace") if settings.prompt is None else settings.prompt
        sample = continuation(
            training.forward,
            report.prompt.encode(),
            count=settings.sample,
            length=settings.seq,
            temperature=settings.temperature,
            seed=settings.seed,
            device=device,
        )
        report.sample = sample.decode(errors="replace")
    report.peak_memory_bytes = _gather(_peak_memory(device), device)
    if rank == 0:
        _publish(settings, report)
    return report


def prepare(settings: TrainSettings, device: torch.device) -> Training:
    """Build, shard (or replicate) and compile the model.

    It is built without memory, sharded, and only then given memory and values: no rank ever holds the whole
    of a sharded model.
    """
    with torch.device("meta"):
        model = Llama(settings.model)
    sharded = settings.backend == "vescale"
    if sharded:
        vc.fully_shard(
            model,
            mesh=mesh_of_all_ranks(device.type),
            reshard_after_forward=settings.reshard,
            mp_policy=vc.MixedPrecisionPolicy(param_dtype=settings.param_dtype, reduce_dtype=torch.float32),
            granularity=RECIPES[settings.optim].granularity(),
        )
    model.to_empty(device=device)
    torch.manual_seed(settings.seed)
    model.reset_parameters()
    if sharded:
        compiled = torch.compile(model, backend="vescale", options={"lowering": settings.lowering}, dynamic=False)
        return Training(model, compiled, lambda: vc.no_sync(model))
    if settings.ddp:
        replica = DistributedDataParallel(model)
        return Training(replica, torch.compile(replica, backend=settings.backend, dynamic=False), replica.no_sync)
    return Training(model, torch.compile(model, backend=settings.backend, dynamic=False), nullcontext)


def optimize(
    settings: TrainSettings, training: Training, data: Iterator[Batch], report: Report, device: torch.device
) -> None:
    """Run the steps and fill in the report's curve and speed."""
    optimizer = RECIPES[settings.optim].build(training.model, settings.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, settings.steps))
    progress = Progress(settings.steps) if dist.get_rank() == 0 else None
    tokens_per_step = report.ranks * settings.batch * settings.seq * settings.accumulate
    loss_sum, summed = torch.zeros((), device=device), 0
    started = first_done = time.monotonic()
    for step in range(1, settings.steps + 1):
        loss_sum += _step(settings, training, optimizer, data, device)
        schedule.step()
        summed += 1
        if step % settings.log_every and step not in (1, settings.steps):
            continue
        # Ranks' clocks differ: all stop when rank 0's time is up.
        late = settings.seconds is not None and time.monotonic() - started > settings.seconds
        shared = torch.stack([loss_sum, loss_sum.new_tensor(float(late and progress is not None))])
        dist.all_reduce(shared)
        loss = shared[0].item() / (report.ranks * summed)
        now = time.monotonic()
        if step == 1:
            first_done, report.first_step_seconds = now, now - started
        else:
            report.tokens_per_second = (step - 1) * tokens_per_step / (now - first_done)
        report.curve.append((step, loss))
        if progress:
            progress.show(step, _state(report, device))
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss} at step {step}; try a lower --lr than {settings.lr}")
        loss_sum, summed = torch.zeros((), device=device), 0
        if shared[1]:
            break
    if progress:
        progress.close()


def _step(
    settings: TrainSettings,
    training: Training,
    optimizer: torch.optim.Optimizer,
    data: Iterator[Batch],
    device: torch.device,
) -> Tensor:
    """One optimizer step over `accumulate` batches; returns their mean loss on this rank."""
    total = torch.zeros((), device=device)
    for index in range(settings.accumulate):
        tokens, labels = _moved(next(data), device)
        is_last = index == settings.accumulate - 1
        with nullcontext() if is_last else training.no_sync():
            loss = training.forward(tokens, labels) / settings.accumulate
            loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(training.model.parameters(), GRADIENT_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return total


def _moved(batch: Batch, device: torch.device) -> Batch:
    """Pinned on its way to a GPU: from pageable memory the host would wait for all that the GPU has to do."""
    tokens, labels = (each.pin_memory() if device.type == "cuda" else each for each in batch)
    return tokens.to(device, non_blocking=True), labels.to(device, non_blocking=True)


def learning_rate(step: int, steps: int) -> float:
    """Fraction of the peak rate at a step counted from 0: a linear warm-up, then a cosine."""
    warmup = max(1, round(WARMUP_FRACTION * steps))
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * (1 + math.cos(math.pi * done)) / 2


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _gather(value: int, device: torch.device) -> list[int]:
    values = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    values[dist.get_rank()] = value
    dist.all_reduce(values)
    return values.tolist()


def _state(report: Report, device: torch.device) -> str:
    speed = "" if math.isnan(report.tokens_per_second) else f"{report.tokens_per_second:,.0f} tokens/s  "
    return f"loss {report.curve[-1][1]:.3f}  {speed}{_peak_memory(device) / 2**20:,.0f} MiB"


def _publish(settings: TrainSettings, report: Report) -> None:
    first, last = report.curve[0][1], report.curve[-1][1]
    peaks = ", ".join(f"{peak / 2**20:,.0f}" for peak in report.peak_memory_bytes)
    print(
        f"loss {first:.3f} → {last:.3f} nats per byte in {report.curve[-1][0]} steps; "
        f"on unseen text {report.validation_loss:.3f}\n"
        f"{report.tokens_per_second:,.0f} tokens/s after a first step of {report.first_step_seconds:.1f} s\n"
        f"peak memory of each rank: {peaks} MiB"
    )
    if settings.sample:
        rule = "─" * 72
        print(f"\n{rule}\n{report.prompt}▸{report.sample}\n{rule}\n(written by the model from ▸ on)\n")
    if settings.backend == "vescale" and "VESCALE_DUMP" in os.environ:
        print(f"graphs before and after each pass: {os.environ['VESCALE_DUMP']}")
    if settings.json is not None:
        measured = {"settings": asdict(settings), "report": asdict(report)}
        settings.json.write_text(json.dumps(measured, indent=2, default=str) + "\n")
