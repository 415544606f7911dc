"""The web page: static files for a browser, and the stream of changes that keeps the page up to date."""
