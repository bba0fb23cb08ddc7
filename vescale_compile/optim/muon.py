"""Muon for hidden matrices and AdamW for the rest: a matrix is whole on one rank, its root, while it is computed."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from ..mesh import sharding_ranks
from ..planner.spec import Granularity, Rows
from ..ragged.dtensor import RaggedDTensor
from .hidden import may_be_hidden_matrix
from .layouts import Layout, layout_of
from .matrices import MatrixPlan, matrices_of, plan_matrices
from .matrix_optimizer import MatrixOptimizer, Members
from .muon_step import MatrixShard, MuonStep
from .newton_schulz import NewtonSchulz, flops
from .units import local_elements, local_grad

_MOST_PLANS = 8


class Muon(MatrixOptimizer):
    r"""Muon (Jordan et al., 2024) for hidden matrices, AdamW for all other parameters, sharded or not.

    A matrix of shape [m, n] gets the update of ``torch.optim.Muon``, bit for bit, from the same gradients, on any
    number of ranks. So does every matrix of a stack [experts, m, n]. (On any number of ranks, but not to the bits of
    ``torch.optim.Muon`` on CPU, where the parameters themselves are bfloat16: its additions round by an element's place
    in memory, and ours don't.) Momentum is kept and advanced where the
    parameter's shards are. Each matrix then travels once, in bfloat16, to its root (a redistribution to a one-hot
    RaggedShard, veScale-FSDP, arXiv 2602.22437), and its update once back; an expert that is whole on its rank doesn't
    travel. Roots are balanced by Newton-Schulz operations over all shapes. What travels is packed into few all-to-alls
    that overlap with computing. One small all-reduce at the start of a step (two with hybrid sharding) compares the
    ranks' gradients. Collectives wait no longer than the process group's timeout.

    Which parameter gets which algorithm is said by a group's ``"algorithm"``, ``"muon"`` or ``"adamw"``. In a group
    without, a rule decides (:func:`vescale_compile.optim.hidden.is_hidden_matrix`): matrices and stacks of them go to
    Muon, except embeddings, heads, biases and kernels, which are told by name. Names are those of
    ``model.named_parameters()``, or those that ``fully_shard`` saw; without either, shapes alone decide, and a warning
    says so. A group in which both occur becomes two, Muon's first, each with a learning rate of its own.

    A parameter without a gradient is skipped, as in ``torch.optim``: no decay, no momentum, no communication.
    ``torch.amp.GradScaler``, ``clip_grad_norm_``, schedulers and ``torch.distributed.checkpoint`` work as with any
    optimizer of ``torch.optim``.

    States, for each parameter, of its shape, dtype and layout: ``momentum_buffer``, or with AdamW ``exp_avg``,
    ``exp_avg_sq`` and ``step``.

    Args:
        params: parameters, named parameters, or groups of either. Sharded ones are all on one mesh.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: of ``torch.optim.Muon``,
            with its defaults; ``lr`` may be a tensor of one element. With ``adjust_lr_fn="match_rms_adamw"``
            (Moonlight, arXiv 2502.16982) AdamW's learning rates and weight decays suit Muon too.
        adamw_lr, adamw_weight_decay: of AdamW groups; None for ``lr`` and ``weight_decay``.
        adamw_betas, adamw_eps: of AdamW groups, where their names are ``betas`` and ``eps``.
        foreach: of AdamW groups, as in ``torch.optim.AdamW``. As in ``torch.optim.Muon``, Muon has no such form.
        exchange_bytes: bytes that one rank should receive at most in one exchange, about; two are in flight.

    Raises:
        ValueError: no matrix at all, a parameter or an option that an algorithm can't take, or sharded parameters on
            several meshes. :meth:`step` also raises :class:`~vescale_compile.optim.gradients.UnusableGradients`.
    """

    algorithm = "muon"
    whole_options = frozenset({"exchange_bytes"})
    agreed_options = ("ns_steps",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = NewtonSchulz().coefficients,
        eps: float = NewtonSchulz().eps,
        ns_steps: int = NewtonSchulz().steps,
        adjust_lr_fn: str | None = None,
        *,
        adamw_lr: float | Tensor | None = None,
        adamw_weight_decay: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.999),
        adamw_eps: float = 1e-8,
        foreach: bool | None = None,
        exchange_bytes: int = 64 << 20,
    ) -> None:
        if isinstance(exchange_bytes, bool) or not isinstance(exchange_bytes, int) or exchange_bytes < 1:
            raise ValueError(f"Muon: exchange_bytes is {exchange_bytes!r}; it must be an int of at least 1")
        self._plans: dict[tuple[tuple[int, int], ...], MatrixPlan] = {}  # by the parameters' ids and ns_steps
        options = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "exchange_bytes": exchange_bytes,
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

    @staticmethod
    def granularity(name: str, param: Tensor) -> Granularity | None:
        """For ``fully_shard(granularity=...)``: stacks of experts are cut between experts, all else anywhere.

        Cut between experts, a stack costs no communication in a step. A matrix travels once however it is cut, so
        blocks would only cost padding. A stack of fewer experts than ranks that shard it (replicas apart) is cut
        anywhere too: kept whole, the experts of a layer of 8 would pad its buffer by 30 % on 16 ranks and by 159 % on
        64 (planned; by less than 1 % where there is an expert for each rank).
        """
        if param.ndim != 3 or not may_be_hidden_matrix(name, param):
            return None
        return Rows(param.shape[1]) if param.shape[0] >= sharding_ranks() else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._plans = {}

    def _wrong_options(self, group: dict[str, Any]) -> list[str]:
        steps, wrong = group["ns_steps"], []
        if not group["momentum"] >= 0:
            wrong.append(f"momentum is {group['momentum']}; it must be at least 0")
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps < 100:
            wrong.append(f"ns_steps is {steps!r}; it must be an int from 1 to 99")
        if len(group["ns_coefficients"]) != 3:
            wrong.append(f"ns_coefficients is {group['ns_coefficients']}; it must be three numbers")
        if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
            wrong.append(f"adjust_lr_fn is {group['adjust_lr_fn']!r}; give 'original', 'match_rms_adamw' or None")
        return wrong

    def _layouts(self, param: Tensor) -> dict[str, Layout | None]:
        return {"momentum_buffer": layout_of(param)}

    def _begin(self, ready: Members, check: Callable[[AbstractSet[Tensor]], None]) -> Callable[[], None]:
        """One step for the sharded parameters, and one for those that every rank holds whole."""
        check(frozenset())
        sharded: Members = [(param, group) for param, group in ready if isinstance(param, RaggedDTensor)]
        whole: Members = [(param, group) for param, group in ready if not isinstance(param, RaggedDTensor)]
        steps = [self._matrix_step(members) for members in (sharded, whole) if members]
        for step in steps:
            step.launch()

        def finish() -> None:
            for step in steps:
                step.finish()

        return finish

    def _matrix_step(self, members: Members) -> MuonStep:
        first = members[0][0]
        mesh = first.device_mesh if isinstance(first, RaggedDTensor) else None
        shards = [
            MatrixShard(
                param=local_elements(param),
                grad=local_grad(param),
                momentum=local_elements(self.state_of(param, group)["momentum_buffer"]),
                start=param.interval[0] if isinstance(param, RaggedDTensor) else 0,
                options=group,
            )
            for param, group in members
        ]
        return MuonStep(self._plan_for(members), shards, mesh.get_group() if mesh is not None else None)

    def _plan_for(self, members: Members) -> MatrixPlan:
        """One for each set of parameters with gradients, of which a program may have a few, in turn."""
        first = members[0][0]
        key = tuple((id(param), group["ns_steps"]) for param, group in members)
        if (plan := self._plans.pop(key, None)) is None:
            matrices = [
                matrix for i, (param, _) in enumerate(members) for matrix in matrices_of(i, param.shape, _held(param))
            ]
            costs = [flops(matrix.shape, members[matrix.param][1]["ns_steps"]) for matrix in matrices]
            ranks = first.device_mesh.size() if isinstance(first, RaggedDTensor) else 1
            chunk = max(self.defaults["exchange_bytes"] // torch.bfloat16.itemsize, 1)
            plan = plan_matrices(matrices, costs, ranks, chunk_numel=chunk)
        self._plans[key] = plan  # the last used is the last
        if len(self._plans) > _MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan


def _held(param: Tensor) -> dict[int, tuple[int, int]]:
    if isinstance(param, RaggedDTensor):
        return param.placement.held(param.shape)
    return {0: (0, param.numel())}
