"""The units of a user's own model as the planner takes them, from modules on the meta device."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from vescale_compile.planner import Granularity, TensorSpec, plan_unit
from vescale_compile.units import find_units, group_by_buffer

GranularityRule = Callable[[str, tuple[int, ...]], Granularity | None]
"""From a parameter's name and shape to the smallest piece of it that may not be cut."""


def from_factory(path: str) -> nn.Module:
    """Calls ``package.module:factory`` without arguments, under the meta device.

    Raises:
        ValueError: the path has no colon, nothing of that name is there, the call fails, or returns no module.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{path!r} is not of the form package.module:factory")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path!r}: {error}") from error
    try:
        with torch.device("meta"):
            model = factory()
    except Exception as error:
        how = "it is called without arguments, under the meta device"
        raise ValueError(f"{path!r}: {type(error).__name__}: {error} ({how})") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{path!r} returned {type(model).__name__}; it must return an nn.Module")
    return model


def from_hf_config(path: Path) -> nn.Module:
    """Builds transformers' model for a ``config.json`` on the meta device: no weights, nothing downloaded.

    Raises:
        ValueError: transformers is not installed, the file is no model config, or its model type is unknown.
    """
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError:
        raise ValueError("--hf-config needs transformers: pip install 'vescale-compile[hf]'") from None
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--hf-config {path}: {error}") from error
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ValueError(f"--hf-config {path}: no model_type in it, so it is not a model's config.json")
    try:
        config = AutoConfig.for_model(**fields)
    except (KeyError, ValueError) as error:
        raise ValueError(f"--hf-config {path}: {error}") from error
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config)
        except ValueError:  # no language model
            return AutoModel.from_config(config)


def unit_specs(
    model: nn.Module, granularity: GranularityRule, world_size: int, device_type: str, alignment_bytes: int
) -> dict[str, list[TensorSpec]]:
    """The tensors of each unit that ``fully_shard(model)`` would make on so many ranks of such devices.

    Parameters of one unit that differ in dtype or in whether they are trained, or are read at different times, have
    buffers of their own, and so are units of their own here, named ``unit#0``, ``unit#1`` and so on.
    """

    def tensors(params: Mapping[str, nn.Parameter]) -> list[TensorSpec]:
        return [
            TensorSpec(name, tuple(p.shape), p.element_size(), granularity(name, tuple(p.shape)))
            for name, p in params.items()
        ]

    def padded_bytes(params: Mapping[str, nn.Parameter]) -> int:
        plans = (
            plan_unit(tensors(group), world_size, alignment_bytes=alignment_bytes) for group in group_by_buffer(params)
        )
        return sum(buffer.shard_bytes for plan in plans for buffer in plan.buffers)

    specs = {}
    units = find_units(
        model, set(), nested_units=False, world_size=world_size, device_type=device_type, padded_bytes=padded_bytes
    )
    for unit in units:
        groups = [group for run in unit.runs for group in group_by_buffer(run)]
        for ordinal, group in enumerate(groups):
            specs[unit.name if len(groups) == 1 else f"{unit.name}#{ordinal}"] = tensors(group)
    return specs
