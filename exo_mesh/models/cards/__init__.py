"""Model cards: what people have written down about models, in TOML files, before any file of a model is here."""
