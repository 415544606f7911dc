"""Limits the values of a body: see `bounded_json`. Pure."""

from __future__ import annotations

from exo_mesh.domain.bounded_json import MAX_VALUES, count_values
from exo_mesh.errors import InputError


def check_values(count: int) -> None:
    """Raises InputError if a body has too many values."""
    if count > MAX_VALUES:
        raise InputError(
            f"the request body has more than {MAX_VALUES} values and names of fields; send fewer, or long texts as "
            "one value each"
        )


class ValueBudget:
    """Limits the values of all JSON texts of one request: of the strings of a body, such as the arguments of earlier
    calls, or of the kept answers that it refers to."""

    def __init__(self, most: int = MAX_VALUES) -> None:
        self._most = self._left = most

    def take(self, text: str | bytes, where: str) -> None:
        """Count a text that is decoded. where: its place in the body. Raises InputError if there are too many values in
        all of them."""
        if len(text) <= 2:  # {}
            return
        # at most one value per character; only a long text is worth the count
        self._left -= len(text) if len(text) < 256 else count_values(text, self._most)
        if self._left < 0:
            message = f"{where}: the JSON texts up to here have more than {self._most} values; send fewer"
            raise InputError(message, param=where)
