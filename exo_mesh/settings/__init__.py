"""Configuration: settings from flags, environment, file and defaults."""
