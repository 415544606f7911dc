"""Text and tokens, at the entry peer: tokenizer, chat template, detokenizer, stop strings, grammars.

Doors: `template` and `tokenizer` (of a model), `rendering` (runs templates, in its own process only), `json_schema` and
`schema_shapes` (one analysis of a schema), `output` (answers, thoughts and tool calls in what a model writes).

Invariants: templates, tokenizers and grammars are a stranger's content, with bounds on time, memory and growth; no text
of a request becomes a control token; what a grammar may write, the reader reads back as the same value.

Not here: the wording of any API (`api`).
"""
