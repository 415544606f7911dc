"""The page: static files for a browser, and the stream of changes that keeps them up to date."""
