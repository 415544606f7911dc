"""The common part of all API dialects: prepares a request, runs it, and keeps the text models that both need."""
