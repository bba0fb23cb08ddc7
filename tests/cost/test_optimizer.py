"""What an optimizer's step is taken to cost."""

from vescale_compile.cost import OPTIMIZERS, Device

DEVICE = Device("d", {}, 100.0, None, 1.0, 0.5, 1.0)


def test_adamw_keeps_two_states_and_moves_seven_times_the_parameters() -> None:
    adamw = OPTIMIZERS["adamw"]
    assert adamw.state_bytes(50) == 100
    assert adamw.seconds(50, DEVICE) == 7 * 50 / (100 * 0.5) + 1.0


def test_sgd_keeps_nothing() -> None:
    assert OPTIMIZERS["sgd"].state_bytes(50) == 0
