"""Which implementation runs where, with the chip faked."""

from types import SimpleNamespace

import jax
import pytest

from inms_jax.kernels import choice
from inms_jax.kernels.gpu import require_ampere


@pytest.fixture
def machine(monkeypatch):
    """Pretend to run on a platform, with operations that say their name or refuse."""
    refusing: set[str] = set()

    def load(operation, name):
        def run():
            if name in refusing:
                raise NotImplementedError(name)
            return f"{operation}/{name}"

        return run

    def become(platform, *refused):
        refusing.clear()
        refusing.update(refused)
        monkeypatch.setattr(jax, "default_backend", lambda: platform)

    monkeypatch.setattr(choice, "_load", load)
    return become


NAMES = ("xla", "pallas_gpu", "pallas_tpu")


@pytest.mark.parametrize(
    ("platform", "chosen"), [("cpu", "xla"), ("gpu", "pallas_gpu"), ("tpu", "pallas_tpu"), ("metal", "xla")]
)
def test_the_platform_chooses_and_xla_takes_what_its_kernel_does_not(machine, platform, chosen):
    machine(platform)
    assert choice.call("copy", NAMES, None) == f"copy/{chosen}"
    assert choice.call("copy", NAMES, "xla") == "copy/xla"
    machine(platform, "pallas_gpu", "pallas_tpu")
    assert choice.call("copy", NAMES, None) == "copy/xla"


def test_a_name_is_taken_at_its_word(machine):
    machine("cpu", "pallas_gpu")
    with pytest.raises(NotImplementedError):
        choice.call("copy", NAMES, "pallas_gpu")
    with pytest.raises(
        ValueError, match=r"copy implementation 'cuda'; there are \['pallas_gpu', 'pallas_tpu', 'xla'\]"
    ):
        choice.call("copy", NAMES, "cuda")


@pytest.mark.parametrize(("capability", "taken"), [("7.5", False), ("8.0", True), ("9.0", True), ("12.0", True)])
def test_chips_that_xla_compiles_no_triton_for_are_refused(monkeypatch, capability, taken):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    if taken:
        require_ampere()
    else:
        with pytest.raises(NotImplementedError, match=r"7\.5.*8\.0"):
            require_ampere()
