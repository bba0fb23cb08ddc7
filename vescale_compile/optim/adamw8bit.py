"""AdamW whose moments are 8-bit codes with one scale for each block, on shards that cut no block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT, StateDict

from ..mesh import whole_mesh
from ..planner import Granularity
from ..ragged.dtensor import RaggedDTensor
from ..runtime.life import ranks_of
from .adamw8bit_kernel import Coefficients
from .adamw8bit_runs import runs_of
from .adamw8bit_state import Member, check_blocks, check_saved, in_memory_order, loaded_states, new_states
from .blocks import Blocks
from .gradients import check_gradients as check_all_gradients
from .gradients import check_layouts
from .groups import unsupported_options
from .units import describe, mark_written

_OF_THIS_RUN = ("foreach", "compile", "check_gradients")  # options that a loaded state does not change


class AdamW8bit(Optimizer):
    """AdamW (arXiv 1711.05101) with 8-bit moments (arXiv 2110.02861), about 2.03 bytes of state for a parameter.

    ::

        vc.fully_shard(model, granularity=vc.optim.AdamW8bit.granularity)
        optimizer = vc.optim.AdamW8bit(model.parameters())

    Moments are stored as codes of the dynamic maps, signed for the first and unsigned for the second, with the
    absolute maximum of each block as its scale. From the same gradients, codes and scales of blocks of 256 are those
    of torchao's ``AdamW8bit`` on one rank. A shard holds whole blocks (veScale-FSDP, arXiv 2602.22437), so steps
    quantize with no communication and give the same bits on any number of ranks.

    A parameter of at least 4096 elements, counted over all ranks, has 8-bit moments; a smaller one has float32 moments.

    The second moment is protected against underflow. Its least code is 0, and stands for anything up to 1.6e-7 of
    the block's largest second moment (a gradient 2,500 times smaller than the block's largest), and up to 1.6e-19 where
    that largest is below 1e-12, the least scale. Where 0 is stored, in a block above that or with a first moment that
    is not 0, the denominator counts that border in and is at least the first moment, so the element moves
    by at most the learning rate, decay apart. What is stored does not change by this.

    An element of a gradient counts as at most 1.8e19, of either sign: the largest whose square is a float32.

    Parameters that lie next to each other in a unit, which is usually all of its matrices, are one run, and a run is
    one call of a function that Inductor compiled. The first step of a process compiles (seconds); afterwards neither
    other sizes nor other learning rates do. Tiles at the edge of a tensor, where they are smaller, are stepped without
    compiling. On CPU compiled and eager steps give the same bits, and both keep float32 moments of a run while it is
    stepped.

    Learning-rate schedulers, ``clip_grad_norm_``, ``torch.amp.GradScaler``, parameter groups (of all options) and
    ``torch.distributed.checkpoint`` work as with ``torch.optim.AdamW``. A parameter without a gradient is skipped.
    Parameters are float32, bfloat16 or float16, from ``fully_shard`` or plain; steps are computed in float32.

    States, for each parameter: ``step``, and either ``exp_avg_codes`` and ``exp_avg_sq_codes`` (uint8, of the
    parameter's shape and layout) with ``exp_avg_scales`` and ``exp_avg_sq_scales`` (float32, [blocks], blocks lying
    where their elements do), or ``exp_avg`` and ``exp_avg_sq`` (float32).

    Args:
        params: parameters, named parameters, or groups of either.
        lr: learning rate, a number or a tensor of one element.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled decay, times the learning rate.
        block: consecutive elements (row-major) that share a scale.
        tile: (rows, columns) that share a scale in tensors of two or more dimensions, read as lines of the last one;
            None for ``block`` elements there too.
        foreach: None and True step each run of parameters at once, False one parameter at a time. The bits are the
            same.
        compile: compile with Inductor, which on CPU needs a C++ compiler; False runs operation by operation, slowly.
        check_gradients: before anything changes, find out whether any rank has a gradient with NaN or infinities, or
            lacks one that others have: one pass over the gradients, and one all-reduce of five integers for each
            parameter (with hybrid sharding two). False communicates nothing, and steps with what there is, as
            ``torch.optim.AdamW`` does.

    Raises:
        TypeError, ValueError: an option or a parameter that can't be used; a shard that cuts a block.
        UnusableGradients: from :meth:`step`, on every rank, with nothing changed.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        block: int = 256,
        tile: tuple[int, int] | None = None,
        foreach: bool | None = None,
        compile: bool = True,
        check_gradients: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "block": block,
            "tile": tile,
            "foreach": foreach,
            "compile": compile,
            "check_gradients": check_gradients,
        }
        self._members: dict[Tensor, Member] = {}
        super().__init__(params, defaults)

    @staticmethod
    def granularity(name: str, param: Tensor) -> Granularity | None:
        """What ``fully_shard(granularity=...)`` must not cut for the default blocks of 256 elements."""
        return _granularity(Blocks(), name, param)

    @staticmethod
    def granularity_for(
        *, block: int = 256, tile: tuple[int, int] | None = None
    ) -> Callable[[str, Tensor], Granularity | None]:
        """What ``fully_shard(granularity=...)`` must not cut for other blocks: those given to the optimizer.

        The result raises ValueError for a parameter that is smaller than a tile.
        """
        return functools.partial(_granularity, Blocks(block, tile))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, whose options are checked, with its parameters, before the next step."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            self._members_of(group)
        except (TypeError, ValueError):
            for param in self.param_groups.pop()["params"]:
                self._members.pop(param, None)
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._members = {}

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step. Every rank must call it.

        Args:
            closure: evaluates the model again and returns the loss.

        Raises:
            UnusableGradients: see ``check_gradients``.
            ValueError: a gradient of this rank that is not dense, or not sharded as its parameter.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @torch.compiler.disable
    def _step(self) -> None:
        _check_all([(group, self._members_of(group)) for group in self.param_groups])
        for group in self.param_groups:
            present = [member for member in self._members_of(group) if member.param.grad is not None]
            by = _coefficients(group)
            for unit in in_memory_order(present):
                self._step_unit(group, unit, by)
            mark_written(member.param for member in present)

    def _step_unit(self, group: dict[str, Any], unit: list[Member], by: Callable[[float], Coefficients]) -> None:
        fresh = [member for member in unit if not self.state[member.param]]
        for member, state in zip(fresh, new_states(fresh), strict=True):
            self.state[member.param] = state
        steps: dict[float, list[Member]] = {}
        for member in unit:
            count = self.state[member.param]["step"].add_(1)
            steps.setdefault(count.item(), []).append(member)
        for step, members in steps.items():
            states = [self.state[member.param] for member in members]
            for run in runs_of(members, states, join=group["foreach"] is not False):
                run.step(by(step), compile=group["compile"])

    def _members_of(self, group: Mapping[str, Any]) -> list[Member]:
        params = group["params"]
        names = group.get("param_names") or [None] * len(params)
        for param, name in zip(params, names, strict=True):
            if param not in self._members:
                self._members[param] = Member.of(param, name, Blocks(group["block"], group["tile"]))
        return [self._members[param] for param in params]

    def load_state_dict(self, state_dict: StateDict) -> None:
        """Loads options and states; states are copied into this optimizer's buffers.

        ``foreach``, ``compile`` and ``check_gradients`` stay as they are. States that are sharded otherwise are
        resharded by ``torch.distributed.checkpoint``.

        Raises:
            ValueError: before anything changes, for states of another optimizer, of other blocks, or that lie on other
                ranks than the parameter's elements.
        """
        states: dict[Tensor, dict[str, Tensor]] = {}
        options = [{name: group[name] for name in _OF_THIS_RUN} for group in self.param_groups]

        # torch would cast states to the parameters' dtype. Its hooks run first, so that users' own are heeded.
        def take_states(_: Optimizer, loaded: StateDict) -> StateDict:
            states.update(self._states_from(loaded))
            return {**loaded, "state": {}}

        def put_states(_: Optimizer) -> None:
            self.state.update(states)
            for group, option in zip(self.param_groups, options, strict=True):
                group.update(option)

        hooks = (
            self.register_load_state_dict_pre_hook(take_states),
            self.register_load_state_dict_post_hook(put_states, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _states_from(self, loaded: StateDict) -> dict[Tensor, dict[str, Tensor]]:
        """New states, by parameter, with the values of a state dict; what does not fit raises ValueError."""
        states: dict[Tensor, dict[str, Tensor]] = {}
        for group, saved_group in zip(self.param_groups, loaded["param_groups"], strict=False):
            members = self._members_of(group)
            saved = {
                member.param: loaded["state"][key]
                for member, key in zip(members, saved_group["params"], strict=False)
                if loaded["state"].get(key)
            }
            blocks = Blocks(saved_group["block"], saved_group["tile"]) if "block" in saved_group else None
            if members:  # the group takes the saved ones, with no state too
                check_blocks(members[0], blocks)
            for unit in in_memory_order([member for member in members if member.param in saved]):
                for member in unit:
                    check_saved(member, saved[member.param])
                values = loaded_states(unit, [saved[member.param] for member in unit])
                states.update(zip((member.param for member in unit), values, strict=True))
        return states


def _granularity(blocks: Blocks, name: str, param: Tensor) -> Granularity | None:
    try:
        return blocks.granularity(param.shape)
    except ValueError as error:
        raise ValueError(f"AdamW8bit.granularity_for: {describe(param, name)}: {error}") from None


def _coefficients(group: Mapping[str, Any]) -> Callable[[float], Coefficients]:
    """Of a group's parameters at their steps: each made once, and the learning rate, maybe on a GPU, read once."""
    lr = float(group["lr"])
    return functools.cache(lambda step: Coefficients.at(step, lr, group["betas"], group["eps"], group["weight_decay"]))


def _check_all(groups: list[tuple[dict[str, Any], list[Member]]]) -> None:
    """Refuses gradients that no step can take, before anything changes."""
    checked = [
        (member.name, member.param, whole_mesh(member.param) if isinstance(member.param, RaggedDTensor) else None)
        for group, members in groups
        if group["check_gradients"]
        for member in members
    ]
    meshes = dict.fromkeys(mesh for _, _, mesh in checked)
    sharded = [mesh for mesh in meshes if mesh is not None]
    if len(sharded) > 1 and len({tuple(ranks_of(mesh)) for mesh in sharded}) > 1:
        raise ValueError(
            "AdamW8bit: its parameters are sharded over meshes of different ranks, which would not all hear of a "
            "gradient that is unusable: build an optimizer for each mesh, or say check_gradients=False"
        )
    for mesh in sharded or meshes:
        # Parameters that every rank holds whole go with the others: ranks must refuse them together, too.
        check_all_gradients("AdamW8bit", [(name, param) for name, param, over in checked if over in (mesh, None)])
    # After ranks were compared, so that none waits for one that has raised this.
    for _, members in groups:
        check_layouts("AdamW8bit", [(member.name, member.param) for member in members])


def _check_options(group: Mapping[str, Any]) -> None:
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"AdamW8bit: lr is a tensor of shape {tuple(lr.shape)}; give one of one element")
    for name in ("lr", "eps", "weight_decay"):
        if not float(group[name]) >= 0:
            raise ValueError(f"AdamW8bit: {name} is {group[name]}; it must be at least 0")
    if not isinstance(betas, list | tuple) or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"AdamW8bit: betas are {betas!r}; give two numbers in [0, 1)")
    for name in ("foreach", "compile", "check_gradients"):
        if not isinstance(group[name], bool) and not (name == "foreach" and group[name] is None):
            raise TypeError(f"AdamW8bit: {name} is {group[name]!r}; give True or False")
    if wrong := unsupported_options(group):
        raise ValueError(f"AdamW8bit: {'; '.join(wrong)}")
    Blocks(group["block"], group["tile"])
