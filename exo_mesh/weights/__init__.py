"""Model files on disk: what they hold, without loading a weight and without a tensor library.

Doors: `store` (directories of models), `model_files` (opens files of a stranger), `card` (exact bytes per layer),
`gguf_*` and `packed` (quantised files), `shipped` (the demo model).

Invariants: regular files of bounded size inside the directory, whatever a config says; bytes are counted from headers
and never estimated; every fact is looked for in all places where transformers looks.

Not here: fetching (`models`), and tensors in memory (engines).
"""
