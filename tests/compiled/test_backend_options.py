"""Options of the backend, and settings of Inductor, that it refuses."""

import pytest
import torch
from ranks import on_ranks
from torch import nn

import vescale_compile as vc
from vescale_compile.cost import DEVICES
from vescale_compile.options import Options


def test_an_option_that_does_not_exist_is_refused():
    with pytest.raises(Exception, match=r"unknown vescale options \['lowring'\]"):
        torch.compile(nn.Linear(2, 2), backend="vescale", options={"lowring": "eager"})(torch.ones(1, 2))


def test_an_option_of_inductors_is_refused_with_where_to_set_it():
    with pytest.raises(Exception, match=r"set torch\._inductor\.config's: max_autotune"):
        torch.compile(nn.Linear(2, 2), backend="vescale", options={"max_autotune": True})(torch.ones(1, 2))


def test_a_mode_is_refused_with_where_to_set_what_it_sets():
    with pytest.raises(Exception, match=r"no mode 'max-autotune'.*can be set in torch\._inductor\.config"):
        torch.compile(nn.Linear(2, 2), backend="vescale", mode="max-autotune")(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"lowering": "cpp"}, "choose one of inductor, eager"),
        ({"deadline": float("inf")}, "deadline=inf: give a number of seconds above 0 and below"),
        ({"deadline": float("nan")}, "deadline=nan: give a number"),
        ({"deadline": True}, "deadline=True: give a number"),
        ({"memory_budget": "0GB"}, "memory_budget='0GB': give a whole number of bytes"),
        ({"memory_budget": 0.5}, "memory_budget=0.5: give a whole number of bytes"),
        ({"memory_budget": float("inf")}, "memory_budget=inf: give a whole number of bytes"),
        (
            {"memory_budget": "101%"},
            "memory_budget='101%': give a whole number of bytes, or a text such as '40GB' or '90%'",
        ),
    ],
)
def test_an_impossible_option_is_refused(options, problem):
    with pytest.raises(Exception, match=problem):
        torch.compile(nn.Linear(2, 2), backend="vescale", options=options)(torch.ones(1, 2))


def test_a_budget_may_be_a_float():
    assert Options(memory_budget=40e9).budget_on(DEVICES["h100"], 0) == 40 * 10**9
    assert Options(memory_budget=40e9).budget_text == Options(memory_budget="40GB").budget_text == "40000000000 bytes"


@on_ranks(1)
def test_freezing_parameters_is_refused():
    torch._dynamo.reset()
    call = torch.compile(vc.fully_shard(nn.Linear(2, 2)).eval(), backend="vescale")
    with (
        torch.no_grad(),
        torch._inductor.config.patch(freezing=True),
        pytest.raises(Exception, match=r"leave out torch\._inductor\.config\.freezing"),
    ):
        call(torch.ones(1, 2))
