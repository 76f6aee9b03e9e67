"""What launches remember of a kernel: asked once, and no device or kernel speaks for another."""

from __future__ import annotations

from itertools import count
from types import ModuleType

import pytest

from ext.build import load_extension

DRIVER, OLD_DRIVER = 12030, 12020
HOPPER, AMPERE = 90, 80
NEW_DEVICES = count()  # nothing is forgotten, so each test has devices of its own


@pytest.fixture(scope="module")
def states(request: pytest.FixtureRequest) -> ModuleType:
    return load_extension(
        "kernel_state_emulated", request.config, emulates_cuda=True, emulation="emulation_driver"
    )


def use(states: ModuleType, device: int, capability: int = HOPPER, driver: int = DRIVER) -> None:
    """Kernels 0 and 1 were compiled for Hopper and for something older."""
    states.set_gpu(device, capability, driver, [90, 80])


def test_the_driver_is_asked_once(states: ModuleType) -> None:
    use(states, next(NEW_DEVICES))
    assert states.ask_whether_waits(0) == ["version", "attributes"]
    assert states.ask_whether_waits(0) == []
    assert states.prefer_shared_memory(0) == ["carveout"]
    assert states.prefer_shared_memory(0) == []


def test_kernels_have_answers_of_their_own(states: ModuleType) -> None:
    """Though their parameters be of one type."""
    use(states, next(NEW_DEVICES))
    assert [states.waits(kernel) for kernel in (0, 1, 0, 1)] == [True, False, True, False]


def test_devices_have_answers_of_their_own(states: ModuleType) -> None:
    hopper, ampere = next(NEW_DEVICES), next(NEW_DEVICES)
    for _ in range(2):
        use(states, hopper)
        assert states.waits(0)
        use(states, ampere, AMPERE)
        assert not states.waits(0)
    use(states, hopper)
    assert states.allow_smem(0, 100_000) == ["smem 100000"]
    use(states, ampere, AMPERE)
    assert states.allow_smem(0, 100_000) == ["smem 100000"]


def test_an_old_driver_is_not_asked_to_chain(states: ModuleType) -> None:
    use(states, next(NEW_DEVICES), driver=OLD_DRIVER)
    assert not states.waits(0)


def test_shared_memory_only_grows(states: ModuleType) -> None:
    """A smaller launch must not take what another thread's larger one is about to need."""
    use(states, next(NEW_DEVICES))
    asked = [states.allow_smem(0, kib * 1024) for kib in (48, 100, 64, 100, 200, 100)]
    assert asked == [[], ["smem 102400"], [], [], ["smem 204800"], []]


def test_what_was_refused_is_asked_again(states: ModuleType) -> None:
    use(states, next(NEW_DEVICES))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="kernel: refused"):
            states.allow_smem(0, 300 * 1024)
    assert states.allow_smem(0, 200 * 1024) == ["smem 204800"]
