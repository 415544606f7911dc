"""Programs that ask an engine one question in a process of their own, and end: surveys, self-tests, measurements."""
