"""`python -m vescale_compile train`: train a small Llama on text that is already on the machine.

Started alone it runs its own local ranks; under `torchrun` it is one of them.
"""

import argparse
import math
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from vescale_compile.examples.llama import SIZES
from vescale_compile.examples.optimizers import RECIPES
from vescale_compile.examples.text import standard_library
from vescale_compile.examples.training import TrainSettings, train
from vescale_compile.local_ranks import check_gpus, join, number_of_ranks, run_local_ranks, under_torchrun
from vescale_compile.quantities import positive

DEFAULT_TEMPERATURE = 0.7
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
PARAM_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LEARNING_RATES = ", ".join(f"{name}: {recipe.lr:g}" for name, recipe in RECIPES.items())
SIZE_OPTIONS = ("layers", "dim", "heads", "kv_heads", "hidden_dim")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `train`. An option left out is None where its default depends on others."""
    data = parser.add_argument_group("data and model")
    data.add_argument("--text", type=Path, metavar="DIR", help="folder of text (Python's standard library)")
    data.add_argument("--model", choices=SIZES, default="small", help="named size (%(default)s)")
    for name in SIZE_OPTIONS:
        data.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help="in place of the size's own")
    data.add_argument("--tie-embeddings", action="store_true", help="one matrix for embedding and output")

    how = parser.add_argument_group("how it runs")
    how.add_argument("--ranks", type=positive, metavar="N", help="processes to start (2; on GPUs one for each)")
    how.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto", help="(auto: cuda if present)")
    how.add_argument("--threads", type=positive, metavar="N", help="CPU threads a rank (cores / local ranks)")
    how.add_argument("--backend", choices=["vescale", "inductor", "aot_eager", "eager"], default="vescale")
    how.add_argument("--lowering", choices=["inductor", "eager"], help="of the vescale backend (inductor)")
    how.add_argument("--ddp", action="store_true", help="replicate with DistributedDataParallel, for comparison")
    how.add_argument("--param-dtype", choices=PARAM_DTYPES, help="of gathers and computation (fp32)")
    how.add_argument(
        "--reshard",
        action=argparse.BooleanOptionalAction,
        help="free unsharded parameters after forward and gather them again in backward (yes)",
    )
    how.add_argument("--dump", type=Path, metavar="DIR", help="write the graphs before and after each pass")

    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=positive, default=300, metavar="N", help="(%(default)s)")
    training.add_argument("--seconds", type=_positive_float, metavar="S", help="stop after this time")
    training.add_argument("--batch", type=positive, default=8, metavar="N", help="windows a rank (%(default)s)")
    training.add_argument("--seq", type=positive, default=128, metavar="N", help="bytes a window (%(default)s)")
    training.add_argument("--accumulate", type=positive, default=1, metavar="N", help="batches a step (1)")
    training.add_argument("--optim", choices=RECIPES, default="adamw", help="(%(default)s)")
    training.add_argument("--lr", type=_positive_float, metavar="X", help=f"peak learning rate ({_LEARNING_RATES})")
    training.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")

    output = parser.add_argument_group("output")
    output.add_argument("--log-every", type=positive, default=10, metavar="N", help="steps (%(default)s)")
    output.add_argument("--sample", type=int, default=300, metavar="N", help="bytes to write; 0: none (300)")
    output.add_argument("--prompt", metavar="TEXT", help="what the sample continues (some unseen text)")
    output.add_argument("--temperature", type=float, metavar="T", help="of the sample; 0: likeliest byte (0.7)")
    output.add_argument("--json", type=Path, metavar="FILE", help="write settings and measurements")


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit status."""
    try:
        settings = settings_from(args)
        device_type = _device_type(args.device)
        ranks = number_of_ranks(args.ranks, device_type)
        _check_group(settings, device_type, ranks)
    except ValueError as error:
        who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
        print(f"train: {who}{error}", file=sys.stderr)
        return 2
    if args.dump is not None:
        os.environ["VESCALE_DUMP"] = str(args.dump)
    if under_torchrun():
        _train_as_rank(int(os.environ["LOCAL_RANK"]), settings, device_type, int(os.environ["LOCAL_WORLD_SIZE"]))
        return 0
    return run_local_ranks("train", _train_as_rank, (settings, device_type), ranks, needs=["vescale_compile.backend"])


def settings_from(args: argparse.Namespace) -> TrainSettings:
    """Fill in the defaults that depend on other options.

    Raises:
        ValueError: an option that would do nothing beside the others, or a value that cannot be.
    """
    _check_options(args)
    text = standard_library() if args.text is None else args.text
    if not text.is_dir():
        raise ValueError(f"--text {text} is not a folder")
    sizes = {name: getattr(args, name) for name in SIZE_OPTIONS if getattr(args, name) is not None}
    return TrainSettings(
        model=replace(SIZES[args.model], **sizes, tie_embeddings=args.tie_embeddings),
        text=text,
        threads=args.threads,
        backend=args.backend,
        lowering=args.lowering or "inductor",
        ddp=args.ddp,
        reshard=args.reshard is not False,
        param_dtype=PARAM_DTYPES[args.param_dtype or "fp32"],
        optim=args.optim,
        lr=RECIPES[args.optim].lr if args.lr is None else args.lr,
        steps=args.steps,
        seconds=args.seconds,
        batch=args.batch,
        seq=args.seq,
        accumulate=args.accumulate,
        seed=args.seed,
        log_every=args.log_every,
        sample=args.sample,
        temperature=DEFAULT_TEMPERATURE if args.temperature is None else args.temperature,
        prompt=args.prompt,
        json=args.json,
    )


def _check_options(args: argparse.Namespace) -> None:
    if args.backend != "vescale":
        for option in ("lowering", "reshard", "param_dtype", "dump"):
            if getattr(args, option) is not None:
                raise ValueError(f"--{option.replace('_', '-')} is for --backend vescale, not {args.backend}")
    if args.ddp and args.backend == "vescale":
        raise ValueError("--ddp is for comparison: give another --backend (inductor) with it")
    if args.sample == 0 and (args.prompt is not None or args.temperature is not None):
        raise ValueError("--prompt and --temperature are for a sample, and --sample 0 writes none")
    if args.sample < 0:
        raise ValueError(f"--sample is {args.sample}; it must be 0 or more")
    if args.temperature is not None and not 0 <= args.temperature < math.inf:
        raise ValueError(f"--temperature is {args.temperature}; it must be 0 or more")
    if args.prompt == "":
        raise ValueError("--prompt is empty; a sample needs a byte to continue")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        raise ValueError(f"--json {args.json}: its folder does not exist")


def _device_type(wanted: str) -> str:
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: this machine has no GPU that PyTorch can use; give --device cpu")
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


def _check_group(settings: TrainSettings, device_type: str, ranks: int) -> None:
    if ranks > 1 and settings.backend != "vescale" and not settings.ddp:
        raise ValueError(
            f"--backend {settings.backend} gives each of {ranks} ranks a model of its own; "
            "add --ddp, or run a single rank"
        )
    if device_type == "cuda":
        check_gpus(ranks, "start fewer, or give --device cpu")


def _train_as_rank(
    local_rank: int,
    settings: TrainSettings,
    device_type: str,
    local_ranks: int,
    rendezvous: str | None = None,
) -> None:
    """Train as one of `local_ranks` that meet at `rendezvous`; without it, as torchrun's environment says."""
    device = join(
        local_rank,
        local_ranks,
        device_type,
        timeout=COLLECTIVE_TIMEOUT,
        rendezvous=rendezvous,
        threads=settings.threads,
    )
    try:
        train(settings, device)
    except Exception as error:
        # The other ranks fail too, for want of this one: each says what happened to it.
        print(f"train: rank {dist.get_rank()}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise
    dist.destroy_process_group()


def _positive_float(value: str) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return number
