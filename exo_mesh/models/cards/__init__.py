"""Model cards: descriptions of models in TOML files, which are known before any file of the model is here."""
