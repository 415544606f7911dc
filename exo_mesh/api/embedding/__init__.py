"""Vectors of texts and scores of documents, for the routes of all dialects."""
