"""Seeds that follow from one."""

from __future__ import annotations

from veldt.seeds import derive, nth


def test_nth_is_splitmix64() -> None:
    """Its first numbers for the seed 1234567, as Vigna's reference code prints them."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [nth(1234567, i) for i in range(1, 6)] == [x >> 1 for x in known]


def test_seeds_of_neighbours_do_not_coincide() -> None:
    found = {nth(derive(0, "pair", generation), i) for generation in range(20) for i in range(-20, 500)}
    assert len(found) == 20 * 520 and all(0 <= x < 2**63 for x in found)
