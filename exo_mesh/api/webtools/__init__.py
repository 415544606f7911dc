"""The web tools: search the web, open a page, read its text. Off by default; pages may only be public ones.

Beside them: the text of PDFs, which needs the same child processes."""
