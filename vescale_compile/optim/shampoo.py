"""Shampoo for hidden matrices and AdamW for the rest, in blocks that no shard cuts: a step communicates nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..planner.spec import Granularity
from ..ragged.dtensor import RaggedDTensor
from ..runtime.writes import version_of
from .hidden import may_be_hidden_matrix
from .inverse_root import NoInverseRoot
from .layouts import Layout, layout_of, new_state, placement_of_blocks
from .matrix_optimizer import MatrixOptimizer, Members, members_of
from .shampoo_blocks import BlockGrid, check_cuts, own_blocks
from .shampoo_step import BlockedShard, Renewed, products_are_finite, renewed_factors, step_blocks
from .shampoo_turns import Turns, turns_of
from .units import describe, local_elements, local_grad, rank_prefix

_BLOCK = 1024


@dataclass(frozen=True)
class _MatrixStep:
    """A step on one parameter, of which nothing is done yet that changes anything.

    Attributes:
        param, group, state: the parameter, its group, its state, which may be new.
        shard: views of them.
        finite: whether no product of gradients overflows, on their device.
        renewed: what was computed already; None if a root can't be.
    """

    param: Tensor
    group: dict[str, Any]
    state: dict[str, Tensor]
    shard: BlockedShard
    finite: Tensor
    renewed: Mapping[int, tuple[Renewed, Renewed]] | None


class Shampoo(MatrixOptimizer):
    r"""Blocked Shampoo for hidden matrices, AdamW for all other parameters, sharded or not.

    For each block G of at most ``block`` rows and columns of a matrix's gradient, with averages M of gradients and V of
    their squares, all corrected for their start at zero (Gupta et al., arXiv 1802.09568; Anil et al., arXiv 2002.09018;
    blocks and grafting as in distributed Shampoo, arXiv 2309.06497)::

        L <- beta2 L + (1 - beta2) G G^T        R <- beta2 R + (1 - beta2) G^T G
        P = (L + ridge |L| I)^(-1/4)  M  (R + ridge |R| I)^(-1/4)       |.| the largest eigenvalue
        W <- (1 - lr weight_decay) W - lr P |M / (sqrt(V) + eps)|_F / |P|_F

    A block is whole on the rank that holds it, if the model was sharded with ``granularity=Shampoo.granularity``. So a
    step computes every block on one rank and communicates only a small all-reduce at its start (two with hybrid
    sharding), which compares the ranks' gradients. Inverse roots are computed by eigendecomposition every
    ``frequency`` steps, but not of all blocks in the same one: they take turns by what they cost, so that steps take
    about as long. Until its first roots a block steps as grafting alone says (``"adam"``: as AdamW). Given the same
    gradients, weights are equal bit for bit on any number of ranks.

    Groups are as those of :class:`~vescale_compile.optim.muon.Muon`, with ``"shampoo"`` for its ``"muon"``.

    Memory for a matrix of b blocks of r x c elements: 2 b (r^2 + c^2) elements for factors and their roots, and twice
    the matrix for averages. During a step those factors and roots that are due exist twice, one in ``frequency``: they
    are computed before anything changes, so that all ranks refuse a step that one of them can't take.

    States of such a matrix, in its dtype: ``exp_avg`` and ``exp_avg_sq``, of its shape and layout; ``left`` and
    ``left_root``, [b, r, r], ``right`` and ``right_root``, [b, c, c], blocks lying where their elements do; ``step``.

    Args:
        params: parameters, named parameters, or groups of either; float32 or float64. Sharded ones are on one mesh.
        lr, weight_decay: the decay is decoupled. ``lr`` may be a tensor of one element.
        betas: of the average of gradients, and of the averages of squares and of factors.
        eps: added to the root of the average of squares.
        ridge: damping of a factor, relative to its largest eigenvalue. Factors in float32 say little of eigenvalues
            below it: steps stay within 5e-4 of float64's with 1e-5, and 5e-3 with 1e-6 (measured, in units of ``lr``,
            with gradients of lower rank than blocks).
        frequency: steps between two computations of a block's inverse roots.
        grafting: the length of a block's step: ``"adam"``'s as above, ``"sgd"`` for that of M, None for that of P.
        block: rows and columns of a block.
        compile: one Inductor kernel and two products for each shape of blocks. Compiled and eager steps may differ in
            the last bits.
        adamw_lr, adamw_weight_decay, adamw_betas, adamw_eps, foreach: of AdamW groups, as in
            :class:`~vescale_compile.optim.muon.Muon`.

    Raises:
        ValueError: no matrix at all, a parameter or an option that an algorithm can't take, sharded parameters on
            several meshes, or a shard that cuts a block. :meth:`step` also raises
            :class:`~vescale_compile.optim.gradients.UnusableGradients`, on every rank, where factors of finite
            gradients overflow on one, or have no inverse roots.
    """

    algorithm = "shampoo"
    whole_options = frozenset({"block", "compile"})
    agreed_options = ("frequency",)
    refusal = "has factors that overflow, or that have no inverse roots"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        ridge: float = 1e-5,
        frequency: int = 10,
        grafting: str | None = "adam",
        block: int = _BLOCK,
        compile: bool = True,
        adamw_lr: float | Tensor | None = None,
        adamw_weight_decay: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        foreach: bool | None = None,
    ) -> None:
        if isinstance(block, bool) or not isinstance(block, int) or block < 2:
            raise ValueError(f"Shampoo: block is {block!r}; it must be an int of at least 2")
        if not isinstance(compile, bool):
            raise TypeError(f"Shampoo: compile is {compile!r}; give True or False")
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "betas": betas,
            "eps": eps,
            "ridge": ridge,
            "frequency": frequency,
            "grafting": grafting,
            "block": block,
            "compile": compile,
        }
        super().__init__(
            params,
            options,
            adamw_lr=adamw_lr,
            adamw_weight_decay=adamw_weight_decay,
            adamw_betas=adamw_betas,
            adamw_eps=adamw_eps,
            foreach=foreach,
        )
        # See BlockedShard. Of roots as they were at a version: for reading them the host waits for a GPU.
        self._rooted: dict[Tensor, tuple[Tensor, int, list[bool]]] = {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rooted = {}

    @staticmethod
    def granularity(name: str, param: Tensor) -> Granularity | None:
        """For ``fully_shard(granularity=...)``: cuts what may be a hidden matrix between blocks of the default size."""
        return _granularity(_BLOCK, name, param)

    @staticmethod
    def granularity_for(*, block: int) -> Callable[[str, Tensor], Granularity | None]:
        """:meth:`granularity` for blocks of another size, that of the optimizer's ``block``."""
        return functools.partial(_granularity, block)

    def _wrong_options(self, group: dict[str, Any]) -> list[str]:
        frequency, wrong = group["frequency"], []
        if not group["ridge"] > 0:  # without it singular factors, as all of thin gradients are, have no root
            wrong.append(f"ridge is {group['ridge']}; it must be above 0")
        if isinstance(frequency, bool) or not isinstance(frequency, int) or frequency < 1:
            wrong.append(f"frequency is {frequency!r}; it must be an int of at least 1")
        if group["grafting"] not in (None, "adam", "sgd"):
            wrong.append(f"grafting is {group['grafting']!r}; give 'adam', 'sgd' or None")
        return wrong

    def _check_matrix(self, name: str | None, param: Tensor) -> None:
        if param.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"{rank_prefix(param)}Shampoo: {describe(param, name)} is {param.dtype}; factors need float32. Keep "
                "parameters in float32, and give fully_shard a MixedPrecisionPolicy"
            )
        check_cuts(param, self._grid(param), name)

    def _grid(self, param: Tensor) -> BlockGrid:
        return BlockGrid(tuple(param.shape), self.defaults["block"])

    def _layouts(self, param: Tensor) -> dict[str, Layout | None]:
        grid = self._grid(param)
        placement = placement_of_blocks(param.placement, grid.shape, grid) if isinstance(param, RaggedDTensor) else None
        left, right = (Layout((grid.count, size, size), placement) for size in grid.largest)
        return {
            "step": None,
            "exp_avg": layout_of(param),
            "exp_avg_sq": layout_of(param),
            "left": left,
            "right": right,
            "left_root": left,
            "right_root": right,
        }

    def _begin(self, ready: Members, check: Callable[[AbstractSet[Tensor]], None]) -> Callable[[], None]:
        gradients = {param for param, _ in ready}
        groups = {p: group for _, p, group in members_of(self.param_groups) if group["algorithm"] == self.algorithm}
        turns = turns_of([self._grid(param) for param in groups])  # of those without a gradient, too
        steps = [
            self._matrix_step(param, group, its_turns)
            for (param, group), its_turns in zip(groups.items(), turns, strict=True)
            if param in gradients
        ]
        # All have been launched by now: a GPU is waited for once, but for roots that are due.
        check({step.param for step in steps if step.renewed is None or not step.finite})

        def finish() -> None:
            for step in steps:
                self._finish(step)

        return finish

    def _matrix_step(self, param: Tensor, group: dict[str, Any], turns: Turns) -> _MatrixStep:
        """What changes nothing of a parameter's step: its views, and the roots that are due."""
        state = self.state.get(param) or new_state(param, self._layouts(param))
        grid = self._grid(param)
        blocks = own_blocks(param, grid)
        left, right = grid.largest
        columns = param.shape[-1]
        left_root = local_elements(state["left_root"]).view(-1, left, left)
        roots, version, rooted = self._rooted.get(param, (None, 0, []))
        if roots is not state["left_root"] or version != version_of(left_root):
            rooted = left_root[:, 0, 0].bool().tolist()  # the diagonal of an inverse root is positive
        shard = BlockedShard(
            param=local_elements(param).view(-1, columns),
            grad=local_grad(param).view(-1, columns),
            exp_avg=local_elements(state["exp_avg"]).view(-1, columns),
            exp_avg_sq=local_elements(state["exp_avg_sq"]).view(-1, columns),
            left=local_elements(state["left"]).view(-1, left, left),
            right=local_elements(state["right"]).view(-1, right, right),
            left_root=left_root,
            right_root=local_elements(state["right_root"]).view(-1, right, right),
            blocks=blocks,
            first_due=[turns.first_due(block, group["frequency"]) for block in blocks],
            rooted=rooted,
        )
        finite = products_are_finite(shard)
        try:
            renewed = renewed_factors(shard, int(state["step"]) + 1, group)
        except NoInverseRoot:
            renewed = None
        return _MatrixStep(param, group, state, shard, finite, renewed)

    def _finish(self, step: _MatrixStep) -> None:
        assert step.renewed is not None  # or the check has raised
        self.state[step.param] = step.state
        step.state["step"] += 1
        count = int(step.state["step"])
        step_blocks(step.shard, count, step.renewed, step.group, compiled=self.defaults["compile"])
        for block in step.renewed:
            step.shard.rooted[block] = True
        roots = step.state["left_root"]
        self._rooted[step.param] = roots, version_of(step.shard.left_root), step.shard.rooted


def _granularity(block: int, name: str, param: Tensor) -> Granularity | None:
    return BlockGrid(tuple(param.shape), block).granularity if may_be_hidden_matrix(name, param) else None
