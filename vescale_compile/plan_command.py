"""`python -m vescale_compile plan`: lay out a model for a number of ranks, without a GPU or the model."""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vescale_compile.planner import Elements, Granularity, Rows, TensorSpec, Whole
from vescale_compile.planner.models import PUBLISHED, published
from vescale_compile.planner.report import report
from vescale_compile.quantities import positive

if TYPE_CHECKING:
    from torch import nn

    from vescale_compile.quantize import BlockFP8

WORLDS = (8, 64, 128, 512, 1024, 8192, 32768)
PLOTTED_ROWS = (1, 16, 32, 128)

Units = Mapping[str, Sequence[TensorSpec]]
Rule = Callable[[str, tuple[int, ...]], Granularity | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `plan`."""
    model = parser.add_argument_group("model").add_mutually_exclusive_group(required=True)
    model.add_argument("--model", choices=PUBLISHED, help="a published model's shapes")
    model.add_argument("--module", metavar="PACKAGE.MODULE:FACTORY", help="call FACTORY on the meta device for a model")
    model.add_argument("--hf-config", type=Path, metavar="FILE", help="build transformers' model for a config.json")

    blocks = parser.add_argument_group("what may not be cut (single elements may be cut anywhere)")
    kind = blocks.add_mutually_exclusive_group()
    kind.add_argument("--rows", type=positive, metavar="N", help="keep blocks of N rows whole")
    kind.add_argument("--elements", type=positive, metavar="N", help="keep blocks of N elements whole")
    kind.add_argument("--tile", type=_tile, metavar="HxW", help="cut as quantize=BlockFP8(tile=(H, W)) does")
    kind.add_argument("--whole", action="store_true", help="keep each matrix on one rank")
    blocks.add_argument(
        "--only",
        type=_regex,
        metavar="REGEX",
        help="of the parameters whose name matches (every one of two or more dimensions that is no bias; of --tile "
        "biases too)",
    )

    layout = parser.add_argument_group("layout")
    layout.add_argument("--world", type=positive, nargs="+", metavar="N", help="numbers of ranks")
    layout.add_argument("--device", choices=("cuda", "cpu"), help="what ranks compute on, without --model (cuda)")
    layout.add_argument("--itemsize", type=positive, metavar="BYTES", help="of an element, with --model (2)")
    layout.add_argument("--alignment", type=positive, default=16, metavar="BYTES", help="of a shard (%(default)s)")
    layout.add_argument("--keep-order", action="store_true", help="leave tensors in the model's order")

    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="figures as JSON instead of tables")
    output.add_argument("--draw", metavar="UNIT", help="draw the buffers of this unit")
    output.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="plot padding against ranks for blocks of 1, 16, 32 and 128 rows; needs matplotlib",
    )


def run(args: argparse.Namespace) -> int:
    """Plan and print; 0 if all went well, 2 if the options make no sense."""
    try:
        _check(args)
        if args.plot is not None:
            _plot(args)
        else:
            _print(args)
    except ValueError as error:
        print(f"plan: {error}", file=sys.stderr)
        return 2
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.world is None and args.plot is None:
        raise ValueError("give the number of ranks with --world N")
    if args.itemsize is not None and args.model is None:
        raise ValueError("--itemsize goes with --model alone; a module's parameters have their own")
    if args.device is not None and args.model is not None:
        raise ValueError("--device goes with --module and --hf-config; a published model's units are its layers")
    if args.plot is not None and (args.json or args.draw or _blocks(args) is not None):
        raise ValueError("--plot draws its own granularities; leave out --json, --draw and block options")
    if args.draw is not None and args.json:
        raise ValueError("--draw draws beside the tables, and --json has figures alone; leave one of them out")
    if args.only is not None and args.plot is None and _blocks(args) is None:
        raise ValueError("--only says which parameters have blocks; give --rows, --elements, --tile or --whole")


def _blocks(args: argparse.Namespace) -> Granularity | BlockFP8 | None:
    if args.tile is not None:
        from vescale_compile.quantize import BlockFP8  # which needs PyTorch

        return BlockFP8(args.tile)
    if args.whole:
        return Whole()
    if args.elements is not None:
        return Elements(args.elements)
    return Rows(args.rows) if args.rows is not None else None


def _rule(args: argparse.Namespace, blocks: Granularity | BlockFP8 | None) -> Rule:
    def rule(name: str, shape: tuple[int, ...]) -> Granularity | None:
        if args.only is not None and not args.only.search(name):
            return None
        if not isinstance(blocks, Granularity | None):
            return _tiled(blocks, name, shape)
        return blocks if args.only is not None or (len(shape) > 1 and not name.endswith("bias")) else None

    return rule


def _tiled(tiles: BlockFP8, name: str, shape: tuple[int, ...]) -> Granularity | None:
    import torch

    try:
        return tiles.granularity(name, torch.empty(shape, device="meta"))
    except ValueError as error:
        raise ValueError(f"--tile: {error}. --only leaves parameters out") from None


def _units(args: argparse.Namespace, blocks: Granularity | BlockFP8 | None, world_size: int) -> Units:
    rule = _rule(args, blocks)
    if args.model is not None:
        found = published(args.model).specs(args.itemsize or 2, rule)
    else:
        from vescale_compile.module_shapes import unit_specs

        model = _module(args.module, args.hf_config)
        found = unit_specs(model, rule, world_size, args.device or "cuda", args.alignment)
    if args.only is not None:
        _check_only(args.only, [tensor.name for unit in found.values() for tensor in unit])
    return found


def _check_only(only: re.Pattern[str], names: Sequence[str]) -> None:
    if not any(map(only.search, names)):
        alike = dict.fromkeys(re.sub(r"\b\d+\b", "N", name) for name in names)  # one for all layers
        raise ValueError(f"--only {only.pattern}: no such parameter; there are {', '.join(alike)}")


@functools.cache
def _module(factory: str | None, hf_config: Path | None) -> nn.Module:
    # Only a user's own model needs PyTorch.
    from vescale_compile import module_shapes

    if factory is not None:
        return module_shapes.from_factory(factory)
    assert hf_config is not None
    return module_shapes.from_hf_config(hf_config)


def _title(args: argparse.Namespace) -> str:
    return str(args.model or args.module or args.hf_config)


def _print(args: argparse.Namespace) -> None:
    blocks = _blocks(args)
    units = [(_units(args, blocks, world), world) for world in args.world]
    for found, _ in units:
        if args.draw is not None and args.draw not in found:
            raise ValueError(f"--draw {args.draw}: no such unit; there are {', '.join(found)}")
    options = {"alignment_bytes": args.alignment, "keep_order": args.keep_order}
    reports = [report(found, world, **options) for found, world in units]
    if args.json:
        figures = [{"model": _title(args), "granularity": repr(blocks)} | r.as_json() for r in reports]
        print(json.dumps(figures, indent=2))
        return
    for planned in reports:
        print(
            f"{_title(args)} on {planned.world_size:,} ranks, blocks: {blocks or 'none'}; "
            f"planned in {1000 * planned.seconds:.1f} ms"
        )
        print(planned, end="\n\n")
        if args.draw is not None:
            print(planned.plans[args.draw], end="\n\n")


def _plot(args: argparse.Namespace) -> None:
    try:
        figure = importlib.import_module("matplotlib.figure").Figure(figsize=(7, 4.5))
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'vescale-compile[plot]'") from None
    worlds = sorted(args.world or WORLDS)
    axes = figure.add_subplot()
    for rows in PLOTTED_ROWS:
        options = {"alignment_bytes": args.alignment, "keep_order": args.keep_order, "advise": False}
        padding = [report(_units(args, Rows(rows), world), world, **options).total.padding_percent for world in worlds]
        axes.plot(worlds, padding, marker="o", label=f"{rows} {'row' if rows == 1 else 'rows'}")
    axes.set(xscale="log", yscale="symlog", xlabel="ranks", ylabel="padding (%)", title=_title(args))
    axes.set_xticks(worlds, [str(world) for world in worlds])
    axes.set_ylim(bottom=0)
    axes.legend(title="blocks")
    try:
        figure.savefig(args.plot)
    except OSError as error:
        raise ValueError(f"--plot {args.plot}: {error}") from error
    print(f"wrote {args.plot}")


def _tile(text: str) -> tuple[int, int]:
    """Rows and columns of a tile."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form HxW, such as 128x128")
    return int(match[1]), int(match[2])


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error
