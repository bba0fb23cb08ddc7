"""What optimizers with an algorithm for hidden matrices share: groups, AdamW for the rest, checks, states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from ..mesh import whole_mesh
from ..ragged.dtensor import RaggedDTensor
from ..runtime.agreement import agree
from .gradients import check_gradients, is_usable
from .groups import split_group, wrong_common_options
from .layouts import Layout, check_state, layout_of, new_state
from .units import describe, local_elements, local_grad, mark_written, rank_prefix

Members = list[tuple[Tensor, dict[str, Any]]]  # parameters and their groups


class MatrixOptimizer(Optimizer):
    """Groups say by ``"algorithm"`` which of two their parameters get: the subclass's own, or ``"adamw"``.

    ``defaults`` holds the options of the subclass's algorithm under their names, AdamW's under theirs with
    ``adamw_`` before them, and those of the optimizer as a whole.

    Args:
        params: parameters, named parameters, or groups of either.
        options: of the subclass's algorithm, and of the optimizer as a whole.
        adamw_lr, adamw_weight_decay: None for those in ``options``.
    """

    algorithm: ClassVar[str]
    whole_options: ClassVar[frozenset[str]]  # no group's own
    agreed_options: ClassVar[tuple[str, ...]]  # of groups, on which the order of collectives depends
    refusal: ClassVar[str] = ""  # what messages say of the gradients of parameters that can't be stepped
    _agreed_groups = 0  # how many there were when ranks compared what they have built

    def __init__(
        self,
        params: ParamsT,
        options: dict[str, Any],
        *,
        adamw_lr: float | Tensor | None,
        adamw_weight_decay: float | None,
        adamw_betas: tuple[float, float],
        adamw_eps: float,
        foreach: bool | None,
    ) -> None:
        of_adamw = {
            "adamw_lr": options["lr"] if adamw_lr is None else adamw_lr,
            "adamw_weight_decay": options["weight_decay"] if adamw_weight_decay is None else adamw_weight_decay,
            "adamw_betas": adamw_betas,
            "adamw_eps": adamw_eps,
            "adamw_foreach": foreach,
        }
        super().__init__(params, {**options, **of_adamw})
        if not any(group["params"] for group in self.param_groups if group["algorithm"] == self.algorithm):
            raise ValueError(
                f"{self._name}: of {sum(len(group['params']) for group in self.param_groups)} parameters none is a "
                f"hidden matrix; use torch.optim.AdamW, or say 'algorithm': {self.algorithm!r} in the group of those "
                "that are"
            )

    @abstractmethod
    def _begin(self, ready: Members, check: Callable[[AbstractSet[Tensor]], None]) -> Callable[[], None]:
        """Begins a step on the parameters that have gradients; returns what ends it.

        Before it changes anything it calls ``check``, once on every rank, with the parameters that this rank can't
        step. That raises on every rank if any rank has one, or gradients that can't be used.
        """

    @abstractmethod
    def _layouts(self, param: Tensor) -> dict[str, Layout | None]:
        """The state that the subclass's algorithm keeps of a parameter, as :func:`new_state` takes it."""

    @abstractmethod
    def _wrong_options(self, group: dict[str, Any]) -> list[str]:
        """What is wrong with those options of a group that are the subclass's algorithm's alone."""

    def _check_matrix(self, name: str | None, param: Tensor) -> None:
        """ValueError for a matrix that the subclass's algorithm can't take."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, or two where the rule finds parameters for both algorithms in it.

        Raises:
            ValueError: as the constructor; nothing is added.
        """
        if not isinstance(param_group, dict) or isinstance(param_group["params"], set):
            super().add_param_group(param_group)  # which refuses them
        self._check_option_names(param_group)
        params = param_group["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        groups = split_group(self._name, {**param_group, "params": params}, self._defaults_by_algorithm())
        for group in groups:
            self._check_group(group)
        self._check_meshes([param for group in groups for _, param, _ in members_of([group])])
        before = len(self.param_groups)
        try:
            for group in groups:
                if isinstance(group["lr"], Tensor) and any(group["lr"] is each["lr"] for each in self.param_groups):
                    group["lr"] = group["lr"].clone()  # schedulers write to each group's
                given = {*group}
                super().add_param_group(group)
                for key in self.defaults.keys() - given:
                    del group[key]  # super() gives every default to every group
        except BaseException:
            del self.param_groups[before:]  # the second of two groups may be refused after the first was added
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Performs a single step. Every rank must call it.

        Args:
            closure: reevaluates the model and returns the loss.

        Raises:
            UnusableGradients: on every rank, before anything is changed, if a gradient has NaN or infinite elements,
                can't be used by the algorithm, or is there on some ranks alone.
            ValueError: instead, on a rank with a gradient that is not dense, or not sharded as its parameter.
            RanksDisagree: ranks have built different optimizers, or given them, or loaded, different options.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._agree()
        members = list(members_of(self.param_groups))
        named = [(name, param) for name, param, _ in members]
        ready = [
            (param, group) for _, param, group in members if is_usable(param) and group["algorithm"] == self.algorithm
        ]
        alike = self._agreed_lines()
        end = self._begin(
            ready, lambda refused: check_gradients(self._name, named, refused=refused, reason=self.refusal, alike=alike)
        )
        for group in self.param_groups:
            if group["algorithm"] == "adamw":
                self._step_adamw([param for param in group["params"] if param.grad is not None], group)
        end()
        mark_written(param for _, param, _ in members if param.grad is not None)
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        # load_state_dict ends here too, with nothing changed yet.
        if "param_groups" in vars(self):
            self._check_algorithms(state["param_groups"])
            for name, param, group in members_of(state["param_groups"]):
                loaded = state["state"].get(param, {})
                check_state(self._name, name, param, loaded, self._layouts_by_algorithm(param, group))
        super().__setstate__(state)
        # Names of process groups are counters, which another run may count otherwise: a loaded mesh is of none, or of
        # others' groups.
        for param, loaded in self.state.items():
            for value in loaded.values():
                if isinstance(param, RaggedDTensor) and isinstance(value, RaggedDTensor):
                    value.share_mesh(param)

    def state_of(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """A parameter's state, made if there is none yet."""
        if not self.state[param]:
            self.state[param].update(new_state(param, self._layouts_by_algorithm(param, group)))
        return self.state[param]

    @property
    def _name(self) -> str:
        return type(self).__name__

    def _defaults_by_algorithm(self) -> dict[str, dict[str, Any]]:
        own = {
            key: value
            for key, value in self.defaults.items()
            if key not in self.whole_options and not key.startswith("adamw_")
        }
        of_adamw = {
            key.removeprefix("adamw_"): value for key, value in self.defaults.items() if key.startswith("adamw_")
        }
        return {self.algorithm: own, "adamw": of_adamw}

    def _layouts_by_algorithm(self, param: Tensor, group: dict[str, Any]) -> dict[str, Layout | None]:
        if group["algorithm"] == self.algorithm:
            return self._layouts(param)
        return {"step": None, "exp_avg": layout_of(param), "exp_avg_sq": layout_of(param)}

    def _check_option_names(self, group: Mapping[str, Any]) -> None:
        if misplaced := sorted(self.whole_options & group.keys()):
            raise ValueError(f"{self._name}: {misplaced} can't be options of a group; give them to the optimizer")
        for key in sorted(self.defaults.keys() & group.keys()):
            if key.startswith("adamw_"):
                raise ValueError(
                    f"{self._name}: {key!r} can't be an option of a group; in a group of 'algorithm': 'adamw' its name "
                    f"is {key.removeprefix('adamw_')!r}"
                )

    def _check_group(self, group: dict[str, Any]) -> None:
        wrong = wrong_common_options(group)
        if group["algorithm"] == self.algorithm:
            wrong += self._wrong_options(group)
            for name, param, _ in members_of([group]):
                self._check_matrix(name, param)
        if wrong:
            raise ValueError(f"{self._name}, {group['algorithm']!r} group: {'; '.join(wrong)}")

    def _check_meshes(self, added: Sequence[Tensor]) -> None:
        known = [param for _, param, _ in members_of(self.param_groups)]
        sharded = [param for param in (*known, *added) if isinstance(param, RaggedDTensor)]
        for param in sharded:
            if (mesh := whole_mesh(param)) != (other := whole_mesh(sharded[0])):
                raise ValueError(
                    f"{rank_prefix(param)}{self._name}: {describe(param)} is sharded over {mesh}, and "
                    f"{describe(sharded[0])} over {other}; build an optimizer for each mesh"
                )

    def _check_algorithms(self, loaded: Sequence[dict[str, Any]]) -> None:
        for i, (mine, theirs) in enumerate(zip(self.param_groups, loaded, strict=True)):
            if theirs.get("algorithm") != mine["algorithm"]:
                raise ValueError(
                    f"{self._name}: group {i} of the state has the algorithm {theirs.get('algorithm')!r}, the "
                    f"optimizer's has {mine['algorithm']!r}; build the optimizer with the groups that the state was "
                    "saved from"
                )

    def _agree(self) -> None:
        """All ranks must have built the same optimizer, or their collectives would not fit each other."""
        members = list(members_of(self.param_groups))
        mesh = next((whole_mesh(param) for _, param, _ in members if isinstance(param, RaggedDTensor)), None)
        if mesh is not None and self._agreed_groups != len(self.param_groups):
            lines = [f"{key} {self.defaults[key]}" for key in sorted(self.whole_options)]
            for name, param, group in members:
                lines.append(f"{describe(param, name)}: {group['algorithm']}")
            agree(mesh, self._name, lines)
            self._agreed_groups = len(self.param_groups)

    def _agreed_lines(self) -> list[str]:
        """The options that ranks compare in every step, and not with :meth:`_agree`: one rank may load others alone."""
        return [
            f"group {i}: {', '.join([group['algorithm'], *(f'{key} {group.get(key)}' for key in self.agreed_options)])}"
            for i, group in enumerate(self.param_groups)
        ]

    def _step_adamw(self, params: Sequence[Tensor], group: dict[str, Any]) -> None:
        states = [self.state_of(param, group) for param in params]
        beta1, beta2 = group["betas"]
        adamw(
            [local_elements(param) for param in params],
            [local_grad(param) for param in params],
            [local_elements(state["exp_avg"]) for state in states],
            [local_elements(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            foreach=group["foreach"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=scalar_lr(group),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def members_of(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str | None, Tensor, Any]]:
    """Every parameter of groups with its name, if it was given one, and its group."""
    for group in groups:
        names = group.get("param_names", [None] * len(group["params"]))
        for name, param in zip(names, group["params"], strict=True):
            yield (param[0], param[1], group) if isinstance(param, tuple) else (name, param, group)


def scalar_lr(group: Mapping[str, Any]) -> Any:
    """A group's learning rate: a number, or a 0-dim tensor."""
    return group["lr"].squeeze() if isinstance(group["lr"], Tensor) else group["lr"]
