"""Verbs that are run in the tests' own process leave logging and the environment as they were."""

from __future__ import annotations

from tests.cli.conftest import no_settings_from_outside

__all__ = ["no_settings_from_outside"]
