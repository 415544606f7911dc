"""Verbs that are run in the tests' own process leave logging and the environment as they were."""

from __future__ import annotations

from tests.cli.conftest import logging_as_before, no_settings_from_outside

__all__ = ["logging_as_before", "no_settings_from_outside"]
