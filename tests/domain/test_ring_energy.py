"""The energy of rings by tokens: figures that can be computed by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exo_mesh.domain.power import MachineEnergy, RingCounts, RingEnergy


def machines(**energy_j: float) -> dict[str, MachineEnergy]:
    return {peer_id: MachineEnergy(joules) for peer_id, joules in energy_j.items()}


def ring(name: str, members: str, prompt: int, output: int, **fields: object) -> RingCounts:
    return RingCounts(name, "m", list(members), prompt, output, **fields)  # type: ignore[arg-type]


def after(*windows: tuple[Mapping[str, MachineEnergy], Iterable[RingCounts]]) -> RingEnergy:
    energy = RingEnergy()
    for found, rings in windows:
        energy.take(found, rings)
    return energy


def test_a_ring_has_the_energy_of_all_its_machines() -> None:
    energy = after(
        (machines(a=100, b=7), [ring("r", "ab", 0, 0)]),
        (machines(a=160, b=37), [ring("r", "ab", 0, 10)]),
    )
    assert (energy.totals["r"].output_j, energy.totals["r"].prompt_j) == (90.0, 0.0)
    assert energy.totals["r"].output_tokens == 10, "so 9 J for each token"


def test_a_window_of_a_prompt_is_the_prompts_and_a_mixed_one_is_shared_by_tokens() -> None:
    energy = after(
        (machines(a=0), [ring("r", "a", 0, 0)]),
        (machines(a=50), [ring("r", "a", 100, 0)]),
        (machines(a=90), [ring("r", "a", 120, 20, prompts=1)]),
    )
    total = energy.totals["r"]
    assert (total.prompt_j, total.output_j, total.prompts) == (70.0, 20.0, 1)


def test_two_nodes_on_one_machine_are_not_counted_twice() -> None:
    both = [{peer: MachineEnergy(base + joules, 77) for peer, base in (("a", 5.0), ("b", 9.0))} for joules in (0, 40)]
    energy = after((both[0], [ring("r", "ab", 0, 0)]), (both[1], [ring("r", "ab", 0, 4)]))
    assert energy.totals["r"].output_j == 40.0


def test_rings_that_share_a_machine_share_its_energy_by_tokens() -> None:
    energy = after(
        (machines(a=0, b=0), [ring("r", "ab", 0, 0), ring("s", "b", 0, 0, is_here=False)]),
        (machines(a=10, b=40), [ring("r", "ab", 0, 10), ring("s", "b", 0, 30, is_here=False)]),
    )
    assert energy.totals["r"].output_j == 10 + 40 * 10 / 40
    assert list(energy.totals) == ["r"], "that of another node's driver is the other node's to tell"


def test_what_an_idle_machine_uses_belongs_to_no_token() -> None:
    still = [ring("r", "a", 5, 5)]
    assert after((machines(a=0), still), (machines(a=500), still)).totals == {}


@pytest.mark.parametrize(
    "second",
    [
        machines(a=10),  # b does not tell
        machines(a=10, b=3),  # b was started again, and counts from 0
    ],
)
def test_a_ring_with_a_member_of_unknown_energy_is_unknown(second: dict[str, MachineEnergy]) -> None:
    energy = after((machines(a=0, b=5), [ring("r", "ab", 0, 0)]), (second, [ring("r", "ab", 0, 10)]))
    assert energy.totals == {}, "neither joules nor tokens: their ratio stays true"


def test_a_driver_that_was_started_again_loses_one_window_and_a_deleted_ring_is_forgotten() -> None:
    energy = after(
        (machines(a=0), [ring("r", "a", 50, 50)]),
        (machines(a=10), [ring("r", "a", 0, 3)]),
        (machines(a=30), [ring("r", "a", 0, 5)]),
    )
    assert energy.totals["r"].output_j == 20.0
    energy.take(machines(a=40), [])
    assert energy.totals == {}


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0, 1e4)), min_size=1, max_size=6))
def test_no_joule_is_lost_or_made(done: list[tuple[int, int, float]]) -> None:
    """Rings on one machine: what they get together is what the machine used, in windows with any token."""
    energy, joules, expected = RingEnergy(), 0.0, 0.0
    counts = {"r": [0, 0], "s": [0, 0]}
    energy.take(machines(a=0.0), [ring(name, "a", *figures) for name, figures in counts.items()])
    for number, (prompt, output, used) in enumerate(done):
        counts["rs"[number % 2]][0] += prompt
        counts["rs"[number % 2]][1] += output
        joules += used
        expected += used if prompt + output else 0.0
        energy.take(machines(a=joules), [ring(name, "a", *figures) for name, figures in counts.items()])
    shared = sum(total.prompt_j + total.output_j for total in energy.totals.values())
    assert shared == pytest.approx(expected, abs=1e-6)
